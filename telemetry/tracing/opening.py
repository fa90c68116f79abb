"""Opens the traces of a process. OpenTelemetry is imported only where there is an exporter."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from telemetry.tracing.span import NO_TRACING, Tracing, TracingUnavailable


@asynccontextmanager
async def open_tracing(
    service: str, *, endpoint: str = "", file: str = "", share: float = 1.0
) -> AsyncIterator[Tracing]:
    """Traces of this process, under the name `service`: to the collector at the base URL `endpoint` (OTLP over HTTP),
    or into `file`; with neither there are none.

    Of the requests that continue no trace, `share` are traced. Spans are exported in a thread, from a queue of 2,048;
    at the end what is left has two seconds. Raises TracingUnavailable.
    """
    if not endpoint and not file:
        yield NO_TRACING
        return
    try:
        from telemetry.tracing.exporters import exporting
        from telemetry.tracing.recorded import RecordingTracing
    except ImportError as error:
        raise TracingUnavailable(
            "traces need the extra `tracing`, which is not installed: pip install 'keepgate[tracing]'"
        ) from error
    async with exporting(service, endpoint, file) as tracer:
        yield RecordingTracing(tracer, share)
