"""Tells of a request that has ended: its line in the log, its durations in the metrics, the end of its trace."""

import logging
import time
from typing import Any

from aiohttp import web

from gateway import metrics
from gateway.settings.operations import LogSettings
from gateway.telemetry.recent_requests import RecentRequests
from gateway.telemetry.record import RECORD, RequestRecord, request_id_of
from gateway.telemetry.statistics import Statistics
from gateway.telemetry.tracing import operation_of
from telemetry.logs import CURRENT_REQUEST
from telemetry.tracing.span import Tracing, Value
from telemetry.tracing.timed import timed

log = logging.getLogger("keepgate.requests")

_MAX_TEXT = 256
# In the order of a line.
_TOLD = (
    "family",
    "stream",
    "model",
    "key",
    "team",
    "cache",
    "layer",
    "reason",
    "upstream",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "prediction",
    "accepted_prediction_tokens",
    "rejected_prediction_tokens",
    "estimated",
    "bytes",
    "error",
)
# A line for people begins with these, and ends with the id of its request as every line does.
_NAMED_BEFORE = ("method", "path", "status", "request_id")


class RequestLog:
    """Begins and ends the records of requests. Every `begin` is followed by one `finish`."""

    def __init__(self, settings: LogSettings, tracing: Tracing, statistics: Statistics, recent: RecentRequests) -> None:
        self.settings = settings
        """Replaced when settings are read again."""
        self.tracing = tracing
        self._statistics = statistics
        self._recent = recent
        self.in_flight = 0
        """Requests that have begun and not ended."""

    def begin(self, request: web.BaseRequest) -> RequestRecord:
        """The record of a request, also at `request[RECORD]`, and from now on what the log names the request by."""
        path = request.raw_path.partition("?")[0]
        record = RequestRecord(request_id_of(request.headers), request.method, path, time.monotonic())
        if self.tracing.is_on:
            record.span = self.tracing.begin(request.headers, request.method)
        record.span = timed(record.span, request.headers, record.began)
        request[RECORD] = record
        CURRENT_REQUEST.set(record)
        self.in_flight += 1
        return record

    def finish(self, record: RequestRecord) -> None:
        """The response has been sent, or was broken off; the record is complete, or is once `ends_with` is done."""
        record.ended = time.monotonic()
        self.in_flight -= 1
        if record.ends_with is None:
            self._tell(record)
        else:
            record.ends_with.add_done_callback(lambda _: self._tell(record))

    def _tell(self, record: RequestRecord) -> None:
        ended = record.ended
        if record.family:
            self._statistics.count(record)
            self._recent.note(record)
            cache = record.cache or "none"
            metrics.request_seconds.labels(record.family, cache).observe(ended - record.began)
            if record.first_byte_at and cache != "hit":
                metrics.first_byte_seconds.labels(record.family, cache).observe(record.first_byte_at - record.began)
        if record.span.is_recorded:
            _end_span(record)
        if self.settings.requests != "none" and self._is_told(record):
            fields = _fields(record)
            log.info("%s", _Line(record, fields), extra={"fields": fields})

    def _is_told(self, record: RequestRecord) -> bool:
        return self.settings.requests == "all" or record.cache not in ("", "hit") or record.status >= 400


class _Line:
    """The fields as people read them; the JSON form has them as they are, and "request" for a message."""

    def __init__(self, record: RequestRecord, fields: dict[str, Any]) -> None:
        self._head = f"{record.method} {_shown(record.path)} {record.status}"
        self._fields = {name: value for name, value in fields.items() if name not in _NAMED_BEFORE}

    def __str__(self) -> str:
        return " ".join((self._head, *(f"{name}={_shown(value)}" for name, value in self._fields.items())))


def _shown(value: object) -> str:
    """A value as one word, which cannot pass for the start of another line or field."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def _fields(record: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path[:_MAX_TEXT],
        "status": record.status,
        "duration": round(record.ended - record.began, 6),
    }
    if record.first_byte_at:
        fields["time_to_first_byte"] = round(record.first_byte_at - record.began, 6)
    if trace_id := record.trace_id:
        fields["trace_id"] = trace_id
    for name in _TOLD:
        if value := getattr(record, name):
            fields[name] = value[:_MAX_TEXT] if isinstance(value, str) else value
    for name in ("cost", "saving"):
        if (dollars := getattr(record, name)) is not None:
            fields[name] = dollars
    return fields


def _end_span(record: RequestRecord) -> None:
    attributes: dict[str, Value] = {
        "http.request.method": record.method,
        "url.path": record.path[:_MAX_TEXT],
        "http.response.status_code": record.status,
        "keepgate.request_id": record.request_id,
    }
    if record.family:
        attributes["gen_ai.operation.name"] = operation_of(record.family)
        attributes["gen_ai.request.model"] = record.model[:_MAX_TEXT]
        attributes["gen_ai.request.stream"] = record.stream
    for name in ("key", "team", "cache", "layer", "upstream", "cost", "saving"):
        if (value := getattr(record, name)) not in ("", None):
            attributes[f"keepgate.{name}"] = value
    if record.route:
        record.span.rename(f"{record.method} {record.route}")
        attributes["http.route"] = record.route
    record.span.set(attributes)
    if record.error or record.status >= 500:
        record.span.fail(record.error or str(record.status))
    record.span.end()
