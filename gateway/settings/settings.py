"""All settings, checked and frozen.

A new setting is a field here. Its type checks it; the description in its `Meta` is what an error message says. Where
settings come from is in sources.py.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import Meta, Struct

_TEN_YEARS = 315_360_000.0
_STORE_OPTIONS = {"db", "protocol", "client_name", "health_check_interval", "socket_keepalive"}

Text = Annotated[str, Meta(min_length=1, description="text that is not empty")]
Flag = Annotated[bool, Meta(description="true or false")]
Port = Annotated[int, Meta(ge=0, le=65_535, description="a port from 1 to 65535, or 0 for any free one")]
Seconds = Annotated[float, Meta(ge=0, le=_TEN_YEARS, description="seconds, from 0 to ten years")]
PositiveSeconds = Annotated[float, Meta(gt=0, le=_TEN_YEARS, description="seconds, more than 0 and at most ten years")]


class SettingsError(Exception):
    """An invalid setting; the message names its source, its key, and what would be right."""


class InvalidValue(ValueError):
    """Why a value is invalid; raised by the checks of a type."""


class Size(int):
    """A number of bytes, written as 1048576 or "1MiB"."""

    _UNITS: ClassVar = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    _MAX: ClassVar = 2**50

    @classmethod
    def parse(cls, value: Any) -> "Size":
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        unit = cls._UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None or float(match[1]) * unit > cls._MAX:
            raise ValueError
        return cls(float(match[1]) * unit)


class PositiveSize(Size):
    """A size of at least 1 KiB."""

    @classmethod
    def parse(cls, value: Any) -> "PositiveSize":
        size = super().parse(value)
        if size < 2**10:
            raise ValueError
        return cls(size)


class Secret(str):
    """Text that never shows in a log or a traceback."""

    @classmethod
    def parse(cls, value: Any) -> "Secret":
        if not isinstance(value, str) or not value:
            raise ValueError
        return cls(value)

    def __repr__(self) -> str:
        return "'***'"


def check_upstream(url: str) -> None:
    """The base URL of an OpenAI-compatible server, or `mock:`, or `mock:FILE.yaml`. Raises ValueError for others."""
    if url.startswith("mock:"):
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or re.search(r"\s", url):
        raise ValueError
    if parts.username is not None:
        raise InvalidValue("expected a URL without credentials: each caller's own Authorization is what is sent on")
    if parts.query or parts.fragment:
        raise InvalidValue("expected a base URL, without anything from `?` or `#` on")


def check_judge(url: str) -> None:
    """The base URL of an OpenAI-compatible server. Raises ValueError for others."""
    if url.startswith("mock:"):
        raise ValueError
    check_upstream(url)


def check_store(url: str) -> None:
    """`embedded`, `none`, or a Redis URL of which redis-py understands every part. Raises ValueError for others."""
    if url in ("embedded", "none"):
        return
    parts = urlsplit(url)
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError
    elif parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.port == 0:  # .port raises ValueError
        raise ValueError
    elif not re.fullmatch(r"(/\d*)?", parts.path):
        raise InvalidValue(f"expected the number of a database after the last slash, got {parts.path[1:]!r}")
    for option, text in parse_qsl(parts.query, keep_blank_values=True):
        if option in ("username", "password"):
            raise InvalidValue(f"expected the {option} in front of the host: redis://USER:PASSWORD@HOST")
        if option not in _STORE_OPTIONS and not option.startswith("ssl_"):
            raise InvalidValue(f"the option {option!r} of the URL is unknown")
        if option == "db" and not text.isdecimal():
            raise InvalidValue(f"expected the number of a database, got db={text!r}")


def masked(url: str) -> str:
    """The URL, or whatever stands where one should, without what may be a password."""
    without_options = re.sub(r"(password=)[^&\s]*", r"\1***", url)
    return re.sub(r"^(\w+:/*)?.*@", r"\1***@", without_options)


Count = Annotated[
    Annotated[int, Meta(ge=1, lt=2**31)] | None, Meta(description="a whole number, 1 or more and below 2147483648")
]
File = Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="the path of a file")]
Codec = Annotated[Literal["plain", "int8", "fp8"] | None, Meta(description="one of plain, int8 and fp8")]
SizeField = Annotated[Size, Meta(description="a size such as 256MiB")]
PositiveSizeField = Annotated[PositiveSize, Meta(description="a size such as 256MiB, at least 1KiB")]


class CacheSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The exact cache."""

    enabled: Flag = True
    """Whether the cache is used at all."""
    ttl: Seconds = 86_400.0
    """How long an answer is fresh."""
    memory: SizeField = Size(256 * 2**20)
    """Bytes that the memory tier of one process may hold."""
    redis_deadline: PositiveSeconds = 0.02
    """How long a request waits for Redis; then it goes on without it."""
    embedded_memory: PositiveSizeField = PositiveSize(512 * 2**20)
    """Bytes that the embedded Valkey may hold."""
    namespace: Annotated[
        str,
        Meta(
            pattern=r"^(authorization|shared|header:[A-Za-z0-9-]+)$",
            description="authorization, shared, or header:NAME",
        ),
    ] = "authorization"
    """What separates tenants: `authorization` (a digest of that header), `header:NAME`, or `shared`."""
    key_headers: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[a-z0-9-]+$")], ...],
        Meta(description="names of headers in lower case, such as x-model-revision"),
    ] = ()
    """Further request headers that may change an answer, beside `anthropic-version`, `anthropic-beta`, `openai-beta`,
    `openai-organization` and `openai-project`: requests that differ in one share no answer.
    """
    sampled: Annotated[
        Literal["reuse", "variants", "bypass"], Meta(description="one of reuse, variants and bypass")
    ] = "reuse"
    """Requests with a temperature and no seed: `reuse` one answer, store `variants` and draw one, or `bypass` the
    cache.
    """
    variants: Annotated[int, Meta(ge=2, le=64, description="a whole number from 2 to 64")] = 3
    """How many answers `sampled: variants` stores."""
    regenerate: Seconds = 0.0
    """Within how many seconds of its answer the same sampled request (a temperature, no seed) wants another one, as by
    the "regenerate" button of a chat UI; 0 for never. The new answer takes the place of the old one.
    """
    stale_while_revalidate: Seconds = 0.0
    """How long after its lifetime an answer is served while it is computed again (RFC 5861)."""
    stale_if_error: Seconds = 0.0
    """How long after its lifetime an answer is served when the upstream fails (RFC 5861)."""
    ask_usage: Flag = True
    """Whether upstreams are asked for the usage of streams whose clients do not ask (`stream_options.include_usage`).
    Then the answer also serves clients who do, and it is withheld from the others. If false, bodies are never changed.
    """
    max_answer: PositiveSizeField = PositiveSize(8 * 2**20)
    """The longest answer that is stored."""


class SemanticSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The semantic cache: answers of similar questions."""

    mode: Annotated[Literal["off", "observe", "on"], Meta(description="one of off, observe and on")] = "off"
    """`observe` serves nothing and counts what it would have served; `on` serves it."""
    policy: Annotated[
        Literal["budget", "vcache", "threshold"], Meta(description="one of budget, vcache and threshold")
    ] = "budget"
    """What decides: `budget` keeps the share of wrong answers of all requests at or below `delta`, `vcache` that of
    each entry; `threshold` serves what is at least as similar as `threshold`, without a bound on wrong answers.
    """
    delta: Annotated[float, Meta(gt=0, le=0.5, description="a share, more than 0 and at most 0.5")] = 0.01
    """The highest share of wrong answers."""
    threshold: Annotated[float, Meta(gt=0, le=1, description="a cosine similarity, more than 0 and at most 1")] = 0.95
    """The lowest similarity that the policy `threshold` serves."""
    model: Text = "default"
    """The embedding model: `default`, a folder, or the name of a sentence-transformers model in the local hub cache."""
    deadline: PositiveSeconds = 0.05
    """How long a request waits for the semantic cache; then it goes on without it."""
    audit_share: Annotated[float, Meta(ge=0, le=1, description="a share from 0 to 1")] = 0.02
    """The largest share of all requests that are answered from the cache and sent to an upstream as well, to compare
    the two.
    """
    capacity: Annotated[int, Meta(ge=1, lt=2**31, description="a whole number of entries, 1 or more")] = 100_000
    """Questions that are stored, some 2 KB each in memory and in Redis; the least used are evicted first."""
    published: Annotated[
        tuple[Annotated[str, Meta(pattern="^(public|[0-9a-f]{20})$")], ...],
        Meta(description="namespaces as GET /v1/cache/entries/{id} names them: public, or 20 hexadecimal digits"),
    ] = ()
    """Namespaces of tenants whose answers may serve all other tenants."""
    confirmations: Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")] = 3
    """How many other tenants must have got the same answer before a published one is served."""
    judge_url: Annotated[str, Meta(description="the URL of a server, such as http://127.0.0.1:8000/v1")] = ""
    """An OpenAI-compatible server with a model that judges whether two answers say the same; without one their
    embeddings decide.
    """
    judge_model: Annotated[str, Meta(description="the name of a model")] = ""
    """The judge's name at that server."""
    judge_key: Annotated[Secret | None, Meta(description="text that is not empty")] = None
    """The API key for that server."""
    judge_recall: Annotated[float, Meta(ge=0.6, le=1, description="a share from 0.6 to 1")] = 0.95
    """The share of same answers that the judge calls the same; its error is part of the budget."""
    judge_share: Annotated[float, Meta(ge=0, le=1, description="a share from 0 to 1")] = 0.1
    """The share of fresh answers that the judge is asked about; audits and the first 500 are always judged."""
    judge_false_same: Annotated[float, Meta(ge=0, le=0.4, description="a share from 0 to 0.4")] = 0.02
    """The share of different answers that the judge calls the same."""


class TimeoutSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Deadlines, in seconds."""

    connect: PositiveSeconds = 5.0
    """To open a connection to an upstream."""
    first_byte: PositiveSeconds = 600.0
    """For the upstream to begin its answer."""
    idle: PositiveSeconds = 120.0
    """Between two chunks of an upstream's answer."""
    client: PositiveSeconds = 60.0
    """For a client to send its body, and to read each chunk."""
    shutdown: Seconds = 10.0
    """For requests in flight after a stop signal."""


class BackendSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the in-repo backend runs: each field is the option of `keepgate backend` of that name, None its default.

    What is None of its prefix store is as prefix_defaults.py says; a `prefix_disk_size` of 0 is no disk tier.
    """

    device: Annotated[Literal["auto", "cpu", "cuda"] | None, Meta(description="one of auto, cpu and cuda")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        Meta(description="one of auto, float32, bfloat16 and float16"),
    ] = None
    quantization: Annotated[
        Literal["none", "auto", "int8", "int4", "fp8", "nf4", "gptq-int4", "awq-int4", "mixed"] | None,
        Meta(description="one of none, auto, int8, int4, fp8, nf4, gptq-int4, awq-int4 and mixed"),
    ] = None
    kv_dtype: Annotated[Literal["auto", "int8", "fp8"] | None, Meta(description="one of auto, int8 and fp8")] = None
    kv_memory: Annotated[PositiveSize | None, Meta(description="a size such as 512MiB, at least 1KiB")] = None
    max_batch: Count = None
    max_context: Count = None
    max_waiting: Count = None
    max_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=_TEN_YEARS)] | None,
        Meta(description="seconds, more than 0 and at most ten years"),
    ] = None
    step_tokens: Count = None
    batching: Annotated[
        Literal["continuous", "dynamic", "static"] | None, Meta(description="one of continuous, dynamic and static")
    ] = None
    max_wait_ms: Annotated[
        Annotated[float, Meta(ge=0, le=_TEN_YEARS)] | None, Meta(description="milliseconds, 0 or more")
    ] = None
    scheduling_policy: Annotated[Literal["fcfs", "priority"] | None, Meta(description="one of fcfs and priority")] = (
        None
    )
    threads: Count = None
    prefix_sharing: Annotated[bool | None, Meta(description="true or false")] = None
    prefix_memory: Annotated[PositiveSize | None, Meta(description="a size such as 512MiB, at least 1KiB")] = None
    prefix_memory_codec: Codec = None
    prefix_disk: Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="the path of a folder")] = None
    prefix_disk_size: Annotated[Size | None, Meta(description="a size such as 4GiB, or 0 for none")] = None
    prefix_disk_codec: Codec = None
    prefix_mooncake: File = None
    prefix_mooncake_codec: Codec = None
    prefix_index: Annotated[
        Annotated[str, Meta(pattern="^(rediss?|unix)://.")] | None,
        Meta(description="a URL such as redis://127.0.0.1:6379/0 or unix:///run/redis.sock"),
    ] = None
    prefix_secret_file: File = None
    prefix_name: Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="text that is not empty")] = None
    prefix_address: Annotated[
        Annotated[str, Meta(pattern="^https?://.")] | None, Meta(description="a URL such as http://10.0.0.7:8081")
    ] = None
    prefix_audit: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)] | None, Meta(description="a whole number, 0 or more and below 2147483648")
    ] = None
    public_prefix: Annotated[tuple[Text, ...], Meta(description="paths of files")] = ()
    chat_template: File = None
    strict_fields: Annotated[bool | None, Meta(description="true or false")] = None
    drop_images: Annotated[bool | None, Meta(description="true or false")] = None

    def __repr__(self) -> str:
        index = None if self.prefix_index is None else masked(self.prefix_index)
        fields = {**msgspec.structs.asdict(self), "prefix_index": index}
        return f"BackendSettings({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    def options(self) -> list[str]:
        """The same as options of the command line."""
        words: list[str] = []
        for name, value in msgspec.structs.asdict(self).items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            elif isinstance(value, tuple):
                words += [f"--{option}={each}" for each in value]
            elif value is not None:
                words.append(f"--{option}={value}")
        return words


class BatchSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's Files and Batch API."""

    enabled: Flag = True
    """Whether the gateway has it. If false, its requests are relayed to an upstream as they are."""
    max_file: PositiveSizeField = PositiveSize(512 * 2**20)
    """The longest file that a client may upload."""
    concurrency: Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")] = 4
    """Requests of batches that one process has under way at the same time."""


class PromptCacheSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The prompt caches that upstreams have themselves."""

    mode: Annotated[Literal["off", "mark"], Meta(description="one of off and mark")] = "off"
    """`mark` adds what makes upstreams use their prompt caches, to requests whose client does not."""
    kinds: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[^=\s/]+=(anthropic|openai|cache-control|none)$")], ...],
        Meta(description="HOST=KIND or HOST:PORT=KIND with a kind of anthropic, openai, cache-control and none"),
    ] = ()
    """What upstreams understand: `anthropic` breakpoints in Messages, `cache-control` also in chat completions,
    `openai` a `prompt_cache_key`. Known without: api.anthropic.com, api.openai.com, Azure and openrouter.ai.
    """


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of `keepgate serve`."""

    host: Text = "127.0.0.1"
    """The address to listen on; `0.0.0.0` for all."""
    port: Port = 8080
    """The port to listen on."""
    workers: Annotated[int, Meta(ge=1, le=256, description="a whole number from 1 to 256")] = 1
    """Processes that share the port, the store and the backend."""
    upstreams: Annotated[tuple[str, ...], Meta(description="URLs such as http://127.0.0.1:8000/v1, or mock:")] = ()
    """Base URLs of OpenAI-compatible servers, `mock:` or `mock:FILE.yaml`; with none the in-repo backend is started."""
    model: Text = "default"
    """What the in-repo backend serves: a folder, a `.gguf` file, a hub id, or `default`."""
    backend: BackendSettings = BackendSettings()
    redis: Annotated[
        str,
        Meta(description="embedded, none, or a URL such as redis://127.0.0.1:6379/0 or unix:///run/redis.sock"),
    ] = "embedded"
    """Where answers are shared and stored: a Redis or Valkey URL, `embedded` (a child process), or `none`."""
    admin_key: Annotated[Secret | None, Meta(description="text that is not empty")] = None
    """The key of the inspection API; without one it answers on the loopback only."""
    state_dir: Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="the path of a folder")] = None
    """The folder of the embedded Valkey, the prefix store, files and batches; by default `~/.local/state/keepgate`
    (XDG_STATE_HOME).
    """
    cors_origins: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")], ...],
        Meta(description="origins such as https://chat.example.org, or *"),
    ] = ()
    """Web pages of these origins may call the gateway from the browser; `*` for any. By default none may."""
    max_body: PositiveSizeField = PositiveSize(32 * 2**20)
    """The longest request body."""
    quantized_variants: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[^=\s]+=[^=\s]+$")], ...],
        Meta(description="pairs such as Qwen3-8B=Qwen3-8B-int4"),
    ] = ()
    """Models and the same with quantised weights, which POST /v1/generate may use under `optimization: full`."""
    responses_ttl: PositiveSeconds = 30 * 86_400.0
    """How long a response can be continued by its id (`previous_response_id` of the Responses API)."""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="one of debug, info, warning and error")
    ] = "info"
    """The least severe messages that are logged."""
    cache: CacheSettings = CacheSettings()
    semantic: SemanticSettings = SemanticSettings()
    prompt_cache: PromptCacheSettings = PromptCacheSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    batches: BatchSettings = BatchSettings()

    def __repr__(self) -> str:
        fields = {**msgspec.structs.asdict(self), "redis": masked(self.redis)}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    @property
    def variants(self) -> dict[str, str]:
        """The quantised variants by the names of their models."""
        return dict(pair.split("=") for pair in self.quantized_variants)

    def state_path(self) -> Path:
        """The directory of persistent data (XDG base directory specification); absolute."""
        if self.state_dir:
            return Path(self.state_dir).expanduser().absolute()
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser().absolute() / "keepgate"
