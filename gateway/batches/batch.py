"""The batch object of OpenAI's Batch API, and the request that makes one."""

from dataclasses import dataclass
from typing import Any

import msgspec
from multidict import CIMultiDictProxy

from gateway.batches.folders import new_id
from gateway.errors import InvalidRequest
from gateway.http.cache_control import TAGS_HEADER
from gateway.http.json_object import decode_object
from gateway.proxy.inference_request import MAX_RISK_HEADER, THRESHOLD_HEADER
from gateway.tenants.credentials import KEY_HEADERS

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
ENDED = ("completed", "failed", "expired", "cancelled")
PREFIX = "batch_"
WINDOW = 86_400
"""Seconds that a batch may take."""

LIFETIMES = range(3600, 2_592_001)
"""Seconds after which a client may let a file expire."""

_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
_KEPT_HEADERS = (
    "authorization",
    *KEY_HEADERS,
    "anthropic-beta",
    "anthropic-version",
    "cache-control",
    "openai-beta",
    "openai-organization",
    "openai-project",
    MAX_RISK_HEADER,
    TAGS_HEADER,
    THRESHOLD_HEADER,
)


class BatchError(msgspec.Struct, frozen=True):
    """Why a batch cannot be run; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines of the input. Those that were not run before a batch ended are in neither `completed` nor `failed`."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    """The sum over the answers in the output file, those from the cache included."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's batch object, as clients get it and as it is stored. Times are Unix seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a client asks for. `output_lifetime` is in seconds, None for the default."""

    input_file_id: str
    endpoint: str
    metadata: dict[str, str] | None
    output_lifetime: int | None

    def batch(self, now: int) -> Batch:
        return Batch(
            id=new_id(PREFIX),
            endpoint=self.endpoint,
            input_file_id=self.input_file_id,
            created_at=now,
            expires_at=now + WINDOW,
            metadata=self.metadata,
        )


def parse_new_batch(body: bytes) -> NewBatch:
    """Raises InvalidRequest, naming the field."""
    fields = decode_object(body)
    if unknown := next((field for field in fields if field not in _FIELDS), None):
        raise InvalidRequest(
            f"{unknown[:100]!r} is no field of a batch, which has {', '.join(_FIELDS)}.", param=unknown[:100]
        )
    if not isinstance(file_id := fields.get("input_file_id"), str):
        raise InvalidRequest("'input_file_id' must be the id of a file with purpose batch.", param="input_file_id")
    endpoint = fields.get("endpoint")
    if endpoint not in ENDPOINTS:
        raise InvalidRequest(f"'endpoint' must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    if fields.get("completion_window") != "24h":
        raise InvalidRequest("'completion_window' must be 24h.", param="completion_window")
    return NewBatch(file_id, endpoint, _metadata(fields.get("metadata")), _output_lifetime(fields))


def parse_lifetime(name: str, anchor: Any, seconds: Any) -> int:
    """The seconds of an `expires_after`, which is called `name`. Raises InvalidRequest."""
    if anchor != "created_at":
        raise InvalidRequest(f"'{name}.anchor' must be created_at.", param=f"{name}.anchor")
    if type(seconds) is not int or seconds not in LIFETIMES:
        raise InvalidRequest(f"'{name}.seconds' must be a whole number from 3600 to 2592000.", param=f"{name}.seconds")
    return seconds


def kept_headers(headers: CIMultiDictProxy[str], namespace_setting: str, further: tuple[str, ...]) -> list[list[str]]:
    """The headers with which a batch was made and its requests are sent: credentials, and what may change an answer.

    `further` are names of the latter kind. Raises InvalidRequest for one that is no UTF-8 text.
    """
    names = {*_KEPT_HEADERS, *further, namespace_setting.removeprefix("header:").lower()}
    kept = [[str(name), value] for name, value in headers.items() if name.lower() in names]
    for name, value in kept:
        try:
            value.encode()
        except UnicodeEncodeError as error:  # other bytes arrive as surrogates
            raise InvalidRequest(f"The header {name} must be UTF-8 text.", param=name) from error
    return kept


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if (
        not isinstance(given, dict)
        or len(given) > 16
        or any(len(key) > 64 or not isinstance(value, str) or len(value) > 512 for key, value in given.items())
    ):
        raise InvalidRequest(
            "'metadata' must be an object of at most 16 texts, with keys of at most 64 and values of at most 512"
            " characters.",
            param="metadata",
        )
    return given


def _output_lifetime(fields: dict[str, Any]) -> int | None:
    given = fields.get("output_expires_after")
    if given is None:
        return None
    if not isinstance(given, dict) or set(given) - {"anchor", "seconds"}:
        raise InvalidRequest(
            "'output_expires_after' must be an object of anchor and seconds.", param="output_expires_after"
        )
    return parse_lifetime("output_expires_after", given.get("anchor"), given.get("seconds"))
