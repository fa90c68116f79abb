"""How the in-repo backend logs and traces, where its own settings do not say."""

from msgspec.structs import replace

from gateway.settings.backend import BackendSettings
from gateway.settings.operations import LogSettings, TraceSettings


def with_telemetry(backend: BackendSettings, log: LogSettings, traces: TraceSettings) -> BackendSettings:
    """The backend's settings, completed by the gateway's own: its spans are part of the same traces."""
    if backend.log_format is None and log.format != "human":
        backend = replace(backend, log_format=log.format)
    if backend.traces_endpoint is not None or backend.traces_file is not None:
        return backend
    match traces.exporter:
        case "otlp":
            return replace(backend, traces_endpoint=traces.endpoint)
        case "file":
            return replace(backend, traces_file=traces.file)
    return backend
