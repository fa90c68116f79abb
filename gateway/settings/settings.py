"""All settings, checked and frozen.

A new setting is a field here. Its type checks it; the description in its `Meta` is what an error message says. Where
settings come from is in sources.py.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.settings.backend import BackendSettings
from gateway.settings.cache import CacheSettings, PromptCacheSettings, SemanticSettings
from gateway.settings.fields import (
    Flag,
    Port,
    PositiveSeconds,
    PositiveSize,
    PositiveSizeField,
    Seconds,
    Secret,
    Text,
    masked,
)
from gateway.settings.limits import KeySettings, LimitSettings
from gateway.settings.operations import (
    CostSettings,
    EncryptionSettings,
    LogSettings,
    SecuritySettings,
    TlsSettings,
    TraceSettings,
)
from gateway.settings.upstreams import (
    BreakerSettings,
    HealthSettings,
    HedgeSettings,
    RetrySettings,
    RoutingSettings,
    UpstreamSettings,
)


class TimeoutSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Deadlines, in seconds."""

    connect: PositiveSeconds = 5.0
    """To open a connection to an upstream."""
    first_byte: PositiveSeconds = 600.0
    """For the upstream to begin its answer."""
    idle: PositiveSeconds = 120.0
    """Between two chunks of an upstream's answer."""
    total: PositiveSeconds = 3600.0
    """For a whole answer, with all retries. A client may ask for less with `x-request-timeout: SECONDS`; what is left
    is sent on to the upstream.
    """
    client: PositiveSeconds = 60.0
    """For a client to send its body, and to read each chunk."""
    shutdown: Seconds = 10.0
    """For requests in flight after a stop signal."""


class BatchSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's Files and Batch API."""

    enabled: Flag = True
    """Whether the gateway has it. If false, its requests are relayed to an upstream as they are."""
    max_file: PositiveSizeField = PositiveSize(512 * 2**20)
    """The longest file that a client may upload."""
    concurrency: Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")] = 4
    """Requests of batches that one process has under way at the same time."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of `keepgate serve`."""

    host: Text = "127.0.0.1"
    """The address to listen on; `0.0.0.0` for all."""
    port: Port = 8080
    """The port to listen on."""
    workers: Annotated[int, Meta(ge=1, le=256, description="a whole number from 1 to 256")] = 1
    """Processes that share the port, the store and the backend."""
    upstreams: Annotated[
        tuple[str | UpstreamSettings, ...], Meta(description="URLs such as http://127.0.0.1:8000/v1, or mock:")
    ] = ()
    """Base URLs of OpenAI-compatible servers, `mock:` or `mock:FILE.yaml`; with none the in-repo backend is started. In
    place of a URL there may be keys and values.
    """
    model: Text = "default"
    """What the in-repo backend serves: a folder, a `.gguf` file, a hub id, or `default`."""
    backend: BackendSettings = BackendSettings()
    redis: Annotated[
        str,
        Meta(description="embedded, none, or a URL such as redis://127.0.0.1:6379/0 or unix:///run/redis.sock"),
    ] = "embedded"
    """Where answers are shared and stored: a Redis or Valkey URL, `embedded` (a child process), or `none`."""
    admin_key: Annotated[Secret | None, Meta(description="one line of text that is not empty")] = None
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
    routing: RoutingSettings = RoutingSettings()
    retries: RetrySettings = RetrySettings()
    breaker: BreakerSettings = BreakerSettings()
    health: HealthSettings = HealthSettings()
    hedging: HedgeSettings = HedgeSettings()
    limits: LimitSettings = LimitSettings()
    keys: KeySettings = KeySettings()
    costs: CostSettings = CostSettings()
    log: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    tls: TlsSettings = TlsSettings()
    security: SecuritySettings = SecuritySettings()
    encryption: EncryptionSettings = EncryptionSettings()

    def __repr__(self) -> str:
        fields = {**msgspec.structs.asdict(self), "redis": masked(self.redis)}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    @property
    def servers(self) -> tuple[UpstreamSettings, ...]:
        """The upstreams, each with all of its settings."""
        return tuple(UpstreamSettings(url=given) if isinstance(given, str) else given for given in self.upstreams)

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
