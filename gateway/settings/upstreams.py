"""Settings of upstreams: the servers, which of them answers a request, and what happens when one fails."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.settings.fields import Count, CredentialField, File, Flag, PositiveSeconds, Seconds, Text

Strategy = Literal["least-connections", "round-robin", "weighted", "power-of-two", "prefix-aware", "model-aware"]
_STRATEGIES = Meta(
    description="one of least-connections, round-robin, weighted, power-of-two, prefix-aware and model-aware"
)
KeyHeader = Annotated[
    Literal["authorization", "x-api-key", "api-key"],
    Meta(description="one of authorization, x-api-key and api-key"),
]
ModelNames = Annotated[
    dict[str, str], Meta(description="pairs of a model and its name there, such as {chat: Qwen3-8B}")
]
HeaderCondition = Annotated[
    Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]+: .+$")] | None,
    Meta(description="a header such as `x-tier: economy`"),
]
Share = Annotated[float, Meta(ge=0, le=1, description="a share from 0 to 1")]
_Origin = Annotated[str, Meta(pattern=r"^https?://[^/\s]+/?$")]
Attempts = Annotated[int, Meta(ge=0, le=10, description="a whole number from 0 to 10")]


class UpstreamSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server."""

    url: Annotated[str, Meta(min_length=1, description="a URL such as http://127.0.0.1:8000/v1, or mock:")]
    """The base URL of an OpenAI-compatible server, `mock:` or `mock:FILE.yaml`."""
    name: str = ""
    """What other settings, metrics and logs call it; by default the host and port of its URL."""
    api_key: CredentialField = None
    """The operator's credential for it, as `env:NAME` or `file:PATH`. With it no client's credential is sent there."""
    api_key_header: KeyHeader = "authorization"
    """The header for `api_key`; in `authorization` it is a bearer token."""
    models: Annotated[
        dict[str, str], Meta(description="pairs of a model and its name there, such as {chat: Qwen3-8B}")
    ] = {}
    """Models that it answers under other names than it lists."""
    weight: Annotated[float, Meta(gt=0, le=1e6, description="a number more than 0")] = 1.0
    """Its share of requests relative to others, where the strategy is `weighted`; its speed for the others."""
    max_requests: Count = None
    """Requests that it is sent at the same time, by each worker; without it there is no limit."""
    max_waiting: Annotated[int, Meta(ge=0, le=100_000, description="a whole number from 0 to 100000")] = 64
    """Requests that wait when `max_requests` are under way; further ones get 429."""
    health_path: Annotated[Annotated[str, Meta(pattern="^/")] | None, Meta(description="a path such as /health")] = None
    """What an active health check asks for; by default /v1/models."""
    predictions: Flag = False
    """Whether requests for chat completions may carry a stored answer as OpenAI's `prediction`: the older answer to the
    same request, or that to a similar question. For servers that use it and bill nothing for it; OpenAI bills what of
    it is not in the answer. The in-repo backend takes them, unless `cache.predictions` is false.
    """
    cache_salt: Annotated[bool | None, Meta(description="true or false")] = None
    """Whether requests name their tenant as vLLM's `cache_salt`, so that tenants share no KV blocks; by default where
    `/v1/models` says `owned_by: vllm`. A server that knows OpenAI's fields only may refuse it.
    """
    kv_events: Annotated[
        Annotated[str, Meta(pattern=r"^(auto|tcp://[^/\s]+:\d+)$")] | None,
        Meta(description="auto, or an address such as tcp://gpu-1:5557"),
    ] = None
    """Where vLLM or SGLang publishes KV cache events (ZeroMQ), for `prefix-aware` routing. With `auto` vLLM is asked
    (`/kv_event_sources`), and all its data-parallel ranks are followed.
    """
    prefix_url: Annotated[
        Annotated[tuple[_Origin, ...], Meta(min_length=1)] | _Origin | None,
        Meta(description="a URL such as http://127.0.0.1:8090, or a list of them"),
    ] = None
    """Where the prefix store of a vLLM answers, if it has Keepgate's: it is inspected and changed by
    `/v1/cache/prefix`. A list for the workers of several ranks.
    """
    price_per_hour: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)] | None, Meta(description="US dollars for an hour, 0 or more")
    ] = None
    """What its machine costs in an hour; the cost of its answers follows from that, not from the price table."""
    ca_file: File = None
    """Certificates to trust for https, in PEM form; by default the system's."""
    verify_tls: Flag = True
    """Whether its certificate is checked."""

    @property
    def prefix_urls(self) -> tuple[str, ...]:
        return (self.prefix_url,) if isinstance(self.prefix_url, str) else tuple(dict.fromkeys(self.prefix_url or ()))


class RuleSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a variant of a model is used: where every condition that is given holds."""

    use: Text
    """The name of the variant."""
    max_prompt_chars: Count = None
    """The prompt has at most so many characters."""
    min_prompt_chars: Count = None
    """The prompt has at least so many characters."""
    tools: Annotated[bool | None, Meta(description="true or false")] = None
    """Whether the request offers tools."""
    teams: Annotated[tuple[Text, ...], Meta(description="names of teams")] = ()
    """The caller's key belongs to one of these teams."""
    keys: Annotated[tuple[Text, ...], Meta(description="names of keys")] = ()
    """The caller's key is one of these."""
    header: HeaderCondition = None
    """The request has this header with this value."""


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How requests for one model are routed."""

    strategy: Annotated[Strategy | None, _STRATEGIES] = None
    """How one of its upstreams is chosen; by default `routing.strategy`."""
    upstreams: Annotated[tuple[Text, ...], Meta(description="names of upstreams")] = ()
    """Its upstreams; by default all that list it."""
    canary: Annotated[dict[str, Share], Meta(description="shares from 0 to 1 by names of upstreams")] = {}
    """The exact share of its requests that these upstreams get, whatever the strategy."""
    fallbacks: Annotated[tuple[Text, ...], Meta(description="names of models")] = ()
    """Models that answer, in this order, when no upstream of this one does."""
    variants: Annotated[dict[str, Text], Meta(description="models by the names of variants")] = {}
    """Other models that may answer for this one, such as `cheap`, `best` or `quantised`. A client may ask for one as
    MODEL:VARIANT."""
    rules: tuple[RuleSettings, ...] = ()
    """Which variant is used; the first rule that holds decides."""
    cold_start: Seconds = 0.0
    """How long an upstream takes to load it, for the strategy `model-aware`."""


class RoutingSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which upstream answers a request."""

    strategy: Annotated[Strategy | None, _STRATEGIES] = None
    """How one of a model's upstreams is chosen; by default `least-connections`, or `prefix-aware` if there are several
    `backend.replicas`."""
    load_bound: Annotated[float, Meta(ge=1, le=10, description="a number from 1 to 10")] = 1.25
    """`prefix-aware` passes over an upstream with more than so many times the mean load of its peers."""
    prefix_blocks: Annotated[int, Meta(ge=1, lt=2**31, description="a whole number, 1 or more")] = 200_000
    """Blocks of prompts (1 KiB of text, some 256 tokens) that `prefix-aware` remembers in each worker, divided among
    the upstreams; the least recently used are evicted first. What all upstreams hold together is right, more does no
    harm."""
    aliases: Annotated[dict[str, Text], Meta(description="models by the names that clients use")] = {}
    """Further names of models."""
    models: Annotated[dict[str, ModelSettings], Meta(description="settings by the names of models")] = {}
    """What differs for single models."""


class RetrySettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests that failed before anything was sent to their client, and are sent once more."""

    attempts: Attempts = 2
    """How often a request is sent again at most."""
    first_pause: PositiveSeconds = 0.1
    """The mean pause before the second retry of one upstream; each further one is twice as long, with full jitter.
    Another upstream is asked at once."""
    longest_pause: PositiveSeconds = 5.0
    """The longest pause; a longer Retry-After is not waited for."""
    budget: Share = 0.2
    """Retries in vain as a share of all requests of the last ten seconds (and at least ten): more feed an overload."""


class BreakerSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When an upstream that fails is left alone."""

    failures: Annotated[int, Meta(ge=1, le=1000, description="a whole number from 1 to 1000")] = 5
    """Failures in a row that open the breaker."""
    open_for: PositiveSeconds = 5.0
    """How long it is left alone; then one request, or a health check, tries it. Doubled at each failure, up to a
    minute."""


class HealthSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Active health checks of upstreams."""

    interval: PositiveSeconds = 15.0
    """Between two checks of one upstream that is well; one that is not is checked every second."""
    deadline: PositiveSeconds = 5.0
    """How long a check waits."""


class HedgeSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A second upstream is asked when the first takes long to begin; the first answer counts (Dean & Barroso, "The Tail
    at Scale", CACM 2013)."""

    after: Seconds = 0.0
    """After how many seconds; 0 for never."""
    share: Share = 0.05
    """Hedged requests as a share of all at most."""
