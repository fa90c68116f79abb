"""OpenAI's requests and answers: the fields that the gateway or the in-repo engine reads. Others are passed on."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Object = dict[str, Any]
Model = Annotated[
    str,
    Meta(
        min_length=1,
        description="The name of a model, as listed by GET /v1/models.",
        examples=["SmolLM2-135M-Instruct"],
    ),
]
Count = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(examples=["What is the capital of France?"])]
Tokens = Annotated[list[int], Meta(min_length=1)]
Inputs = Text | Annotated[list[str | int | Tokens], Meta(min_length=1)]
"""A text, texts, token ids, or lists of token ids."""


class StreamOptions(Struct):
    include_usage: bool | None = None


class ChatMessage(Struct, kw_only=True):
    """One message of a conversation. Content is text, or a list of parts such as {"type": "text", "text": "…"}."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool", "function"], Meta(examples=["user"])]
    content: Text | list[Object] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Object] | None = None
    function_call: Object | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str, Meta(description="The same under another name.")] | None = None


class SamplingFields(Struct, kw_only=True):
    """What chat completions and completions have in common."""

    model: Model
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, description="The number of choices.")] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(description="A request with a seed has one answer.")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: Annotated[int, Meta(description="Lower is served first. Not part of the key.")] | None = None
    cache_salt: Annotated[str, Meta(description="Shared with requests of the same salt only.")] | None = None
    structured_outputs: Object | None = None
    guided_json: Object | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatFields(SamplingFields, kw_only=True):
    """The fields of a chat but for its messages."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    response_format: Object | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Object] | None = None
    function_call: str | Object | None = None
    modalities: list[str] | None = None
    prediction: (
        Annotated[Object, Meta(description="What the answer may be, as {type: content, content: TEXT}.")] | None
    ) = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class ChatCompletionRequest(ChatFields, kw_only=True):
    """A chat. Fields that are not listed are passed on, and are part of the key."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]


class CompletionRequest(SamplingFields, kw_only=True):
    """A prompt. Fields that are not listed are passed on, and are part of the key."""

    prompt: Inputs
    logprobs: Count | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class Usage(Struct, kw_only=True):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: Object | UnsetType | None = UNSET
    completion_tokens_details: Object | UnsetType | None = UNSET


class AnswerMessage(Struct, kw_only=True):
    role: str
    content: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[Object] | UnsetType | None = UNSET


class ChatChoice(Struct, kw_only=True):
    index: Count
    message: AnswerMessage
    finish_reason: str | None
    logprobs: Object | UnsetType | None = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(Struct, kw_only=True):
    index: Count
    text: str
    finish_reason: str | None
    logprobs: Object | UnsetType | None = UNSET


class Completion(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class EmbeddingsRequest(Struct, kw_only=True):
    """Texts to embed; each is an entry of the cache. Fields that are not listed are passed on."""

    model: Model
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    priority: int | None = None


class Embedding(Struct, kw_only=True):
    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingsUsage(Struct):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class ModelObject(Struct, kw_only=True):
    id: str
    object: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    owned_by: str | UnsetType = UNSET


class ModelList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[ModelObject]


class ResponsesRequest(Struct, kw_only=True):
    """A request of the Responses API. Fields that are not listed are passed on, and are part of the key."""

    model: Model
    input: Text | list[Object] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: Annotated[bool, Meta(description="Whether the response is kept, to be continued and read.")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Count | None = None
    max_output_tokens: Count | None = None
    text: Object | None = None
    reasoning: Object | None = None
    include: list[str] | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    metadata: Object | None = None
    background: bool | None = None
    conversation: str | Object | None = None
    prompt: Object | None = None


class ResponseUsage(Struct, kw_only=True):
    input_tokens: Count
    output_tokens: Count
    total_tokens: Count


class OutputItem(Struct, kw_only=True):
    """A message, reasoning, or a call."""

    type: str
    id: str | UnsetType = UNSET
    status: str | UnsetType | None = UNSET


class Response(Struct, kw_only=True):
    id: str
    object: Literal["response"]
    created_at: float
    status: str
    model: str
    output: list[OutputItem]
    error: Object | None
    incomplete_details: Object | None
    usage: ResponseUsage | None


class InputItemList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[Object]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response"]
    deleted: bool
