"""What is Keepgate's own: generation, the inspection API, health, and the errors of each form of API."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.api.openapi.openai_schemas import ChatFields, ChatMessage, Count, Model, Object, Text, Usage
from gateway.api.operator.statistics import AgeClass, Breakdown, SizeClass, Window

Share = Annotated[float, Meta(ge=0, le=1)]


class Error(Struct, kw_only=True):
    """`param` names the field at fault; `code` is for programs, `message` for people."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Struct, kw_only=True):
    error: Error


class AnthropicErrorDetail(Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(Struct, kw_only=True):
    type: Literal["error"]
    error: AnthropicErrorDetail


class OllamaError(Struct, kw_only=True):
    error: str


class GenerateFields(ChatFields, kw_only=True):
    """All other fields are those of chat completions or, with `raw`, of completions."""

    system: str | None = None
    raw: Annotated[bool, Meta(description="Whether the prompt is used without a chat template.")] | None = None
    optimization: (
        Annotated[
            Literal["none", "basic", "full"],
            Meta(
                description="none: computed by itself; basic: exact cache and shared calls; full, the default: also"
                " similar questions and quantised weights."
            ),
        ]
        | None
    ) = None


class GenerateRequest(GenerateFields, kw_only=True):
    """One text, for a prompt or for messages."""

    prompt: Text | None = None
    messages: list[ChatMessage] | None = None


class GenerateBatchRequest(GenerateFields, kw_only=True):
    """Up to 4096 texts: for prompts, or for requests with fields of their own. The other fields are for all."""

    model: Model | None = None  # type: ignore[assignment]  # each of the requests may name one
    prompts: list[str] | None = None
    requests: list[Object] | None = None


class Generation(Struct, kw_only=True):
    id: str | None
    object: Literal["generation"]
    created: int | None
    model: str | None
    text: str
    finish_reason: str | None
    usage: Usage


class GenerationTotals(Struct, kw_only=True):
    """`computed_tokens` are the completion tokens that no cache saved."""

    items: Count
    succeeded: Count
    failed: Count
    cache_hits: Count
    prompt_tokens: Count
    completion_tokens: Count
    computed_tokens: Count
    seconds: float
    items_per_second: float
    tokens_per_second: float


class GenerationResult(Struct, kw_only=True):
    """What became of one item: a generation, or an error."""

    index: Count
    status: int
    seconds: float
    cache: Object | UnsetType = UNSET
    generation: Generation | UnsetType = UNSET
    error: Any = UNSET


class GenerationBatch(Struct, kw_only=True):
    object: Literal["generation.batch"]
    optimization: Literal["none", "basic", "full"]
    results: list[GenerationResult]
    totals: GenerationTotals


class Saved(Struct, kw_only=True):
    """What hits saved: tokens that were not computed, and seconds of waiting."""

    prompt_tokens: Count
    completion_tokens: Count
    seconds: Annotated[float, Meta(ge=0)]


class UnreadableRecords(Struct, kw_only=True):
    """Records of Redis that count as misses: those that no key decrypts, and damaged ones."""

    undecryptable: Count | UnsetType = UNSET
    corrupt: Count | UnsetType = UNSET


class TierFigures(UnreadableRecords, kw_only=True):
    """`entries` and `bytes` are null while the shared store does not answer. `writes_dropped` were not taken by it."""

    hits: Count
    misses: Count
    failures: Count
    hit_rate: Share
    entries: Count | None
    bytes: Count | None
    evictions: Count | UnsetType = UNSET
    available: bool | UnsetType = UNSET
    writes_dropped: Count | UnsetType = UNSET


class Tiers(Struct, kw_only=True):
    memory: TierFigures
    redis: TierFigures | UnsetType = UNSET


class ExactLayer(Struct, kw_only=True):
    hits: Count
    misses: int
    bypasses: Count
    failures: Count
    hit_rate: Share
    entries: Count
    bytes: Count
    saved: Saved
    tiers: Tiers


class NormalizedLayer(Struct, kw_only=True):
    hits: Count
    saved: Saved


class SemanticLayer(NormalizedLayer, kw_only=True):
    mode: Literal["off", "observe", "on"]
    available: bool | UnsetType = UNSET


class Layers(Struct, kw_only=True):
    exact: ExactLayer
    normalized: NormalizedLayer
    semantic: SemanticLayer


class PrefixFigures(Struct, kw_only=True):
    """Of prompt tokens, those that upstreams read from their prompt caches, and those that they wrote there."""

    prompt_tokens: Count
    prefix_tokens: Count
    written_tokens: Count | UnsetType = UNSET
    hit_rate: Share


class PrefixReuse(PrefixFigures, kw_only=True):
    """Of the prompts that were computed: how many tokens an upstream had computed before."""

    upstreams: dict[str, PrefixFigures]


class PredictionFigures(Struct, kw_only=True):
    """Answers that were computed with a stored one as prediction, and how many tokens of it were in them, or not."""

    answers: Count
    accepted_tokens: Count
    rejected_tokens: Count


class Predictions(PredictionFigures, kw_only=True):
    sources: dict[str, PredictionFigures]


class CacheStats(Struct, kw_only=True):
    """Counts are since the start of this host's processes, those of `windows` of all that share the Redis."""

    requests: Count
    collapsed: Count
    hit_rate: Share
    saved: Saved
    layers: Layers
    prefix: PrefixReuse
    predictions: Predictions
    conversations: UnreadableRecords
    windows: dict[str, Window]
    by: Breakdown | UnsetType = UNSET
    ages: list[AgeClass]
    sizes: list[SizeClass]


class DeletedEntry(Struct, kw_only=True):
    """`labels`, of an answer that was reported wrong: how many servings of it the semantic cache has learned from."""

    id: str
    deleted: bool
    labels: Count | UnsetType = UNSET


class Purged(Struct, kw_only=True):
    """A purge, or with `tenant` what was stored of a tenant and what a last look still found."""

    purged: Literal["all", "namespace", "model", "tag", "layer", "before"] | UnsetType = UNSET
    before: float | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tag: str | UnsetType = UNSET
    layer: Literal["semantic"] | UnsetType = UNSET
    erased: Literal["tenant"] | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    found: int | UnsetType = UNSET
    removed: int | UnsetType = UNSET
    remaining: int | UnsetType = UNSET
    seconds: float | UnsetType = UNSET
    verified: bool | UnsetType = UNSET


class PromptOfStore(Struct, kw_only=True):
    """A prompt or a conversation, as the in-repo engine's /tokenize takes it."""

    model: Model | None = None
    prompt: str | None = None
    messages: list[Object] | None = None
    tools: list[Object] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class RepliesOfStores(Struct, kw_only=True):
    """The reply of each upstream by its URL, or its error. Several stores of one upstream reply by their own URLs."""

    upstreams: dict[str, Object]


class Health(Struct, kw_only=True):
    status: Literal["ok"]


class Readiness(Struct, kw_only=True):
    status: Literal["ready", "starting"]
