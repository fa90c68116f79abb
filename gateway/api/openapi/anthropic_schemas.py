"""Anthropic's requests and answers: the fields that the gateway reads. Others are passed on to who has this API."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.api.openapi.openai_schemas import Count, Model, Object, Text


class ContentBlock(Struct, kw_only=True):
    """A text, image, document, tool use, tool result or thinking; its other fields depend on the type."""

    type: Annotated[str, Meta(examples=["text"])]
    text: str | UnsetType = UNSET


class Turn(Struct, kw_only=True):
    role: Annotated[Literal["user", "assistant", "system"], Meta(examples=["user"])]
    content: Text | list[ContentBlock]


class CountTokensRequest(Struct, kw_only=True):
    model: Model
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[Object] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A request for a message. Fields that are not listed are passed on, and are part of the key."""

    max_tokens: Annotated[int, Meta(ge=1, examples=[1024])]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Count | None = None
    stop_sequences: list[str] | None = None
    metadata: Object | None = None


class MessageUsage(Struct, kw_only=True):
    input_tokens: Count
    output_tokens: Count
    cache_creation_input_tokens: Count | UnsetType | None = UNSET
    cache_read_input_tokens: Count | UnsetType | None = UNSET


class Message(Struct, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    chat_completion: (
        Annotated[dict[str, Any], Meta(description="What the chat completion that was translated says beyond.")]
        | UnsetType
    ) = UNSET


class TokenCount(Struct, kw_only=True):
    input_tokens: Count


class AnthropicModel(Struct, kw_only=True):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelPage(Struct, kw_only=True):
    """For clients that send `anthropic-version`."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
