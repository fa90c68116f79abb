"""Settings of the caches: exact, semantic, and upstreams' own."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.settings.fields import (
    Flag,
    PositiveSeconds,
    PositiveSize,
    PositiveSizeField,
    Seconds,
    Secret,
    Size,
    SizeField,
    Text,
)


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
    predictions: Flag = True
    """Whether stored answers that are not served are sent to upstreams as what the answer may be, from which an engine
    that verifies them computes the same answer in fewer steps: to the in-repo backend, and to upstreams with
    `predictions: true`.
    """
    max_answer: PositiveSizeField = PositiveSize(8 * 2**20)
    """The longest answer that is stored."""


class SemanticSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The semantic cache: answers of similar questions."""

    mode: Annotated[Literal["off", "observe", "on"], Meta(description="one of off, observe and on")] = "off"
    """`observe` serves nothing and counts what it would have served; `on` serves it."""
    policy: Annotated[Literal["budget", "threshold"], Meta(description="budget or threshold")] = "budget"
    """What decides: `budget` keeps the share of wrong answers of all requests at or below `delta`; `threshold` serves
    what is at least as similar as `threshold`, without a bound on wrong answers.
    """
    delta: Annotated[float, Meta(gt=0, le=0.5, description="a share, more than 0 and at most 0.5")] = 0.01
    """The highest share of wrong answers."""
    threshold: Annotated[float, Meta(gt=0, le=1, description="a cosine similarity, more than 0 and at most 1")] = 0.95
    """The lowest similarity that the policy `threshold` serves."""
    request_threshold: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="a cosine similarity, more than 0 and at most 1")
    ] = None
    """The lowest similarity that requests may ask for in `x-keepgate-threshold`: they get what is at least so similar,
    whatever its risk, outside `delta`. By default none may.
    """
    model: Text = "default"
    """The embedding model: `default`, a folder, or the name of a sentence-transformers model in the local hub cache;
    with `model_url` its name at that server.
    """
    model_url: Annotated[str, Meta(description="the URL of a server, such as http://127.0.0.1:8000/v1")] = ""
    """A server with OpenAI's embeddings API that computes the vectors (TEI, vLLM, a gateway); without one this host
    does. While it does not answer within `deadline`, no similar question is found, and requests go on without.
    """
    model_key: Annotated[Secret | None, Meta(description="one line of text that is not empty")] = None
    """The API key for that server."""
    model_prompt: Annotated[str | None, Meta(description="text, which may be empty")] = None
    """What is put before each question, such as `query: ` for E5; by default what the files of a model say, and nothing
    for a server's.
    """
    deadline: PositiveSeconds = 0.05
    """How long a request waits for the semantic cache; then it goes on without it."""
    audit_share: Annotated[float, Meta(ge=0, le=1, description="a share from 0 to 1")] = 0.02
    """The largest share of all requests that are answered from the cache and sent to an upstream as well, to compare
    the two: of answers to similar questions, and once more of answers to the same question.
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
    judge: Annotated[
        Annotated[str, Meta(pattern="^(embedding|upstream|https?://.+)$")],
        Meta(description="embedding, upstream, or the URL of a server, such as http://127.0.0.1:8000/v1"),
    ] = "embedding"
    """What judges whether two answers say the same: `embedding` compares texts and their embeddings; `upstream` asks
    the model that answered, through this gateway and at its price; a URL asks a model of an OpenAI-compatible server.
    How often it errs is measured on your traffic.
    """
    judge_model: Annotated[str, Meta(description="the name of a model")] = ""
    """The judge's name at the server of that URL; with `upstream` a model to ask in place of the one that answered."""
    judge_key: Annotated[Secret | None, Meta(description="one line of text that is not empty")] = None
    """The API key for that server; with `upstream` one for this gateway, to whose tenant its cost is charged."""
    judge_share: Annotated[float, Meta(ge=0, le=1, description="a share from 0 to 1")] = 0.1
    """The share of fresh answers that a model is asked about; audits and the first 500 are always judged."""
    show_questions: Flag = False
    """Whether operators see the texts of both questions in `GET /v1/cache/semantic/decisions`. They are prompts of
    tenants: kept in memory for that list, and in no log either way.
    """


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
