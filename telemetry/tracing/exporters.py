"""Where spans go: to a collector, or into a file. Both are written to by a thread, never by a request."""

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Tracer

from telemetry.tracing.span import TracingUnavailable

_EVERY_MILLISECONDS = 1000
_EXPORT_SECONDS = 5.0
_LAST_SECONDS = 2.0
# Of the user alone: the names of models and tenants' keys are in it.
_FILE_MODE = 0o600


@asynccontextmanager
async def exporting(service: str, endpoint: str, file: str) -> AsyncIterator[Tracer]:
    """What makes the spans of a service, and exports them. Raises TracingUnavailable if the file cannot be written."""
    exporter: SpanExporter
    if endpoint:
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_SECONDS)
    else:
        exporter = FileExporter(Path(file))
    provider = TracerProvider(ALWAYS_ON, Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EVERY_MILLISECONDS))
    try:
        yield provider.get_tracer("keepgate")
    finally:
        # A daemon: a collector that hangs holds up the end of the process for this time only.
        ending = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, _LAST_SECONDS)


class FileExporter(SpanExporter):
    """Appends a line for each batch, OTLP's JSON encoding of an ExportTraceServiceRequest, as the collector's file
    receiver reads it. Several processes may append to one file, and it may be rotated.
    """

    def __init__(self, path: Path) -> None:
        """Raises TracingUnavailable if the file cannot be written."""
        self._path = path.expanduser()
        try:
            self._path.touch(_FILE_MODE)
        except OSError as error:
            raise TracingUnavailable(f"{path}: the file of traces cannot be written: {error.strerror}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write them with one call. Raises OSError, which the SDK logs."""
        request = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for resource in request["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    for identified in (span, *span.get("links", ())):
                        _use_hexadecimal_ids(identified)
        with self._path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(request) + b"\n")
        return SpanExportResult.SUCCESS


def _use_hexadecimal_ids(identified: dict[str, Any]) -> None:
    """OTLP writes ids so, and not in base64 as protobuf's JSON has it."""
    for name in ("traceId", "spanId", "parentSpanId"):
        if name in identified:
            identified[name] = base64.b64decode(identified[name]).hex()
