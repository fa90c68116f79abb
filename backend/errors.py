"""Errors of the backend, and the one place that says how each of them looks on the wire.

BackendError
├── ModelError            the model directory, file or package cannot be served
│   ├── PrefixStoreError  its prefix store cannot be opened as configured
│   └── EngineLost        a process that computes a part of it has ended
└── RequestError          an HTTP answer in OpenAI's error form (status, type, param, code)
    ├── InvalidRequest    400: the body asks for something wrong or for something not offered
    ├── ContextLengthExceeded  400: prompt and answer do not fit the context
    ├── ModelNotFound     404
    ├── BodyTooLarge      413
    ├── QueueFull         429, with Retry-After
    ├── GenerationFailed  500: the engine failed while it worked on the request
    ├── Unavailable       503: the server is stopping or out of memory, or its engine has broken down
    └── DeadlineExceeded  504: the time that the caller gave is over
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

OUT_OF_MEMORY = "there is not enough memory"


class BackendError(Exception):
    """Root of every error that this package raises on purpose."""


class ModelError(BackendError):
    """A model cannot be loaded; the message names the file or the field and what would be right."""


# Dataclasses, which msgspec writes as well: the engine alone needs no HTTP packages.
@dataclass(frozen=True, slots=True)
class ErrorBody:
    """The object under ``error`` in OpenAI's error form."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """OpenAI's error form: ``{"error": {"message", "type", "param", "code"}}``."""

    error: ErrorBody


class PrefixStoreError(ModelError):
    """The prefix store cannot be opened as it is configured; the message begins with a field of ``StoreConfig``."""


class EngineLost(ModelError):
    """A rank of an engine has ended or is stuck, so the engine cannot go on; the message names the rank."""


class RequestError(BackendError):
    """An error that the caller of the HTTP interface gets to see.

    Args:
        message: what was wrong and what would be right; never contains what a prompt said.
        param: name of the offending field, as a path such as ``messages[0].content``.
    """

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def response(self) -> ErrorResponse:
        """The body of the HTTP response."""
        return ErrorResponse(ErrorBody(self.message, self.type, self.param, self.code))


class InvalidRequest(RequestError):
    """400: a field is wrong, unknown, or asks for what this server does not offer."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param)
        self.code = code


class ContextLengthExceeded(RequestError):
    """400: the prompt, or the prompt and the answer asked for, do not fit the context."""

    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    """404: a model that is not served here."""

    status = 404
    code = "model_not_found"


class NotFound(RequestError):
    """404: no such path."""

    status = 404


class MethodNotAllowed(RequestError):
    """405: the path exists, the method does not."""

    status = 405


class BodyTooLarge(RequestError):
    """413: the body is over the limit."""

    status = 413
    code = "request_too_large"


class QueueFull(RequestError):
    """429: as many requests wait as may wait."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which another try makes sense."""


class GenerationFailed(RequestError):
    """500: the engine failed on this request."""

    status = 500
    type = "server_error"
    code = "generation_failed"


class Unavailable(RequestError):
    """503: the server is stopping or out of memory, or its engine has broken down."""

    status = 503
    type = "server_error"
    code = "unavailable"


class DeadlineExceeded(RequestError):
    """504: the answer was not complete in the time that the caller, or the server for all, had given."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


def is_out_of_memory(error: BaseException) -> bool:
    """Of the classes that Python and torch have for it, or the plain RuntimeError that torch's CPU allocator raises."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
