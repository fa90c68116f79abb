"""Settings for those who operate the gateway: costs, logs, traces, TLS, security, encryption of what is stored."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.settings.fields import CredentialField, File, Flag, PositiveSeconds
from gateway.settings.upstreams import Share

_DOLLARS = "US dollars for a million tokens, 0 or more"
Price = Annotated[float, Meta(ge=0, le=1e6, description=_DOLLARS)]
OptionalPrice = Annotated[Annotated[float, Meta(ge=0, le=1e6)] | None, Meta(description=_DOLLARS)]
Credentials = Annotated[
    tuple[Annotated[str, Meta(pattern=r"^(env|file):.+$")], ...], Meta(description="env:NAME or file:PATH")
]


class PriceSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a model costs, in US dollars for a million tokens. What is left out of the last two costs as input does."""

    input: Price
    """Prompt tokens."""
    output: Price
    """Tokens of the answer."""
    cached_input: OptionalPrice = None
    """Prompt tokens that the upstream read from its prompt cache."""
    cache_write: OptionalPrice = None
    """Prompt tokens that the upstream wrote to its prompt cache."""


class CostSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What answers cost, and what hits saved: docs/guides/costs.md."""

    enabled: Flag = True
    """Whether costs are computed and recorded."""
    prices: Annotated[dict[str, PriceSettings], Meta(description="prices by models, or by UPSTREAM/MODEL")] = {}
    """Prices that replace or add to the table that comes with Keepgate; `UPSTREAM/MODEL` is for one upstream."""
    backend_per_hour: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)] | None, Meta(description="US dollars for an hour, 0 or more")
    ] = None
    """What the machine of the in-repo backend costs in an hour."""
    keep: PositiveSeconds = 400 * 86_400.0
    """How long hourly totals are kept in Redis."""


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is logged, on standard error. No prompt, answer or credential ever is."""

    format: Annotated[Literal["human", "json"], Meta(description="human or json")] = "human"
    """Lines for people, or a JSON object for each."""
    requests: Annotated[Literal["none", "misses", "all"], Meta(description="one of none, misses and all")] = "none"
    """Which requests get a line of their own."""
    audit_file: File = None
    """A file for the actions of operators, a JSON object for each; by default they are lines of the log."""


class TraceSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Traces (OpenTelemetry): docs/guides/observability.md. Needs the extra `tracing`."""

    exporter: Annotated[Literal["none", "otlp", "file"], Meta(description="one of none, otlp and file")] = "none"
    """Where spans go: to a collector (OTLP over HTTP), or to a file."""
    endpoint: Annotated[
        str,
        Meta(
            pattern=r"^https?://[^/@\s?#]+(/[^@\s?#]*)?$",
            description="a URL such as http://127.0.0.1:4318, without credentials",
        ),
    ] = "http://127.0.0.1:4318"
    """The collector's base URL; headers for it are in the environment, as OTEL_EXPORTER_OTLP_HEADERS."""
    file: File = None
    """The file, a JSON object of OTLP for each batch of spans; processes and workers may share it."""
    share: Share = 1.0
    """The share of requests that are traced; a caller's `traceparent` decides for its own."""


class TlsSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS for clients."""

    certificate: File = None
    """The certificate chain, in PEM form; read again when the settings are."""
    key: File = None
    """Its private key."""


class SecuritySettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What requests may name: docs/threat-model.md."""

    urls: Annotated[Literal["public", "any", "none"], Meta(description="one of public, any and none")] = "public"
    """Which URLs of images, files and MCP servers an upstream may be told to fetch: `public` refuses those of private
    networks and of this machine, `none` all but `data:`.
    """
    hosts: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|[A-Za-z0-9.:-]+)$")], ...],
        Meta(description="names such as gateway.example.org, or *"),
    ] = ()
    """Names that the gateway answers to; others get 421. By default any, but on the loopback only names of the
    loopback, against web pages that pretend to be there, unless virtual keys are required and `admin_key` is set; `*`
    for any.
    """


class EncryptionSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Encryption of what is stored in Redis (AES-256-GCM). Needs the extra `encryption`."""

    key: CredentialField = None
    """A key of 32 bytes as base64, as `env:NAME` or `file:PATH`; by default nothing is encrypted."""
    old_keys: Credentials = ()
    """Former keys: what was stored with them can still be read."""
