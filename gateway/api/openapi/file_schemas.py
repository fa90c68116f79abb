"""Files, batches, audio, images, moderations, reranking and scores, as OpenAI's API and vLLM have them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.api.openapi.openai_schemas import Model, Object, Text
from gateway.batches.batch import ENDPOINTS, LIFETIMES, Batch
from gateway.batches.files import PURPOSES, FileObject

Binary = Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]
Seconds = Annotated[int, Meta(ge=LIFETIMES[0], le=LIFETIMES[-1])]


class NewFile(Struct, kw_only=True, forbid_unknown_fields=True):
    file: Binary
    purpose: Annotated[str, Meta(extra_json_schema={"enum": list(PURPOSES)})]
    anchor: Literal["created_at"] | UnsetType = msgspec.field(default=UNSET, name="expires_after[anchor]")
    seconds: Seconds | UnsetType = msgspec.field(default=UNSET, name="expires_after[seconds]")


class FileList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, kw_only=True):
    id: str
    object: Literal["file"]
    deleted: bool


class Lifetime(Struct, kw_only=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Seconds


class NewBatch(Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: Annotated[str, Meta(description="A file with purpose batch.")]
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": list(ENDPOINTS)})]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    output_expires_after: Lifetime | None = None


class BatchList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModerationRequest(Struct, kw_only=True):
    input: Text | list[str | Object]
    model: str | None = None


class RerankRequest(Struct, kw_only=True):
    query: Text
    documents: list[str | Object]
    model: str | None = None
    top_n: int | None = None


class ScoreRequest(Struct, kw_only=True):
    text_1: Text | list[str]
    text_2: Text | list[str]
    model: str | None = None


class SpeechRequest(Struct, kw_only=True):
    model: Model
    input: Text
    voice: str | Object | None = None
    stream_format: Annotated[str, Meta(description='"sse" is passed on, and not cached.')] | None = None


class AudioForm(Struct, kw_only=True):
    file: Binary
    model: Model
    language: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    response_format: str | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    stream: Annotated[bool, Meta(description="A stream is passed on, and not cached.")] | UnsetType = UNSET


class ImagesRequest(Struct, kw_only=True):
    """Without a seed the request is passed on, and not cached."""

    prompt: Text | UnsetType = UNSET
    model: str | None = None
    seed: int | None = None


class ImagesForm(Struct, kw_only=True):
    """Without a seed the request is passed on, and not cached."""

    image: Binary | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class Results(Struct, kw_only=True):
    """A list of results, under `results` or `data`."""

    results: list[Any] | UnsetType = UNSET
    data: list[Any] | UnsetType = UNSET
