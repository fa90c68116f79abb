"""Ollama's requests and answers: the fields that the gateway reads. Others are passed on to who has this API."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.api.openapi.openai_schemas import Count, Model, Object, Text


class OllamaMessage(Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, examples=["user"])]
    content: Text | None = None
    images: Annotated[list[str], Meta(description="Images in base64.")] | None = None
    thinking: str | None = None
    tool_calls: list[Object] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFields(Struct, kw_only=True):
    """What chats and prompts have in common."""

    model: Model
    stream: Annotated[bool, Meta(description="A stream is the default.")] | None = None
    format: Annotated[str, Meta(extra_json_schema={"enum": ["", "json"]})] | Object | None = None
    options: Annotated[Object, Meta(description="Such as temperature, seed, num_predict and stop.")] | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    """A chat. Without messages it asks for the model to be loaded, which it is."""

    messages: list[OllamaMessage] | None = None
    tools: list[Object] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """A prompt. Without one it asks for the model to be loaded, which it is."""

    prompt: Text | None = None
    system: str | None = None
    images: list[str] | None = None
    suffix: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: list[int] | None = None


class OllamaAnswer(Struct, kw_only=True):
    """Durations are in nanoseconds; 0 where nobody knows."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: Count | UnsetType = UNSET
    load_duration: Count | UnsetType = UNSET
    prompt_eval_count: Count | UnsetType = UNSET
    prompt_eval_duration: Count | UnsetType = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Count | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    keepgate: (
        Annotated[Object, Meta(description="What the answer that was translated says beyond this, as JSON Patch.")]
        | UnsetType
    ) = UNSET


class OllamaAnswerMessage(Struct, kw_only=True):
    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Object] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    response: str


class OllamaEmbedRequest(Struct, kw_only=True):
    """Texts to embed. Without one it asks for the model to be loaded, which it is."""

    model: Model
    input: Text | list[str] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    options: Object | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddings(Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: Count | UnsetType = UNSET
    load_duration: Count | UnsetType = UNSET
    prompt_eval_count: Count | UnsetType = UNSET


class OllamaEmbeddingRequest(Struct, kw_only=True):
    """The older form: one text."""

    model: Model
    prompt: Text | None = None
    options: Object | None = None
    keep_alive: str | float | None = None


class OllamaEmbedding(Struct, kw_only=True):
    embedding: list[float]


class OllamaModelRequest(Struct, kw_only=True):
    """Older clients say `name` for `model`."""

    model: Model
    name: str | None = None
    verbose: bool | None = None


class OllamaPullRequest(Struct, kw_only=True):
    """Older clients say `name` for `model`."""

    model: Model
    name: str | None = None
    stream: bool | None = None


class OllamaStatus(Struct, kw_only=True):
    status: str


class OllamaModel(Struct, kw_only=True):
    """An upstream of another kind says little of its models: sizes are 0 and texts empty."""

    name: str
    model: str
    size: Count
    digest: str
    details: Object


class OllamaTaggedModel(OllamaModel, kw_only=True):
    modified_at: str


class OllamaModels(Struct, kw_only=True):
    models: list[OllamaTaggedModel]


class OllamaRunningModel(OllamaModel, kw_only=True):
    expires_at: str
    size_vram: Count
    context_length: Count


class OllamaRunningModels(Struct, kw_only=True):
    models: list[OllamaRunningModel]


class OllamaModelDescription(Struct, kw_only=True):
    details: Object
    model_info: Object
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Struct, kw_only=True):
    version: str
