"""Traces as the settings have them."""

import logging
from pathlib import Path

import pytest

from gateway.settings.backend import BackendSettings
from gateway.settings.fields import SettingsError
from gateway.settings.operations import LogSettings, TraceSettings
from gateway.settings.sources import load
from gateway.settings.telemetry_defaults import with_telemetry
from gateway.telemetry.tracing import open_tracing
from telemetry.tracing.span import NO_SPAN
from tests.telemetry.tracing.collector import Collector


async def test_the_exporter_is_a_collector_or_a_file(tmp_path: Path) -> None:
    """The other one's setting is not used."""
    file = tmp_path / "traces"
    async with Collector().serving() as collector:
        for exporter in ("otlp", "file", "none"):
            settings = TraceSettings(exporter=exporter, endpoint=collector.url, file=str(file))
            async with open_tracing(settings) as tracing:
                tracing.begin({}, exporter).end()
                assert (tracing.begin({}, "x") is NO_SPAN) == (exporter == "none")
            assert file.exists() == (exporter != "otlp")
        assert {span.name for span in collector.spans} == {"otlp"}
        assert collector.services == {"keepgate-gateway"}
    assert '"name":"file"' in file.read_text()
    assert '"name":"otlp"' not in file.read_text()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (TraceSettings(exporter="file"), r"traces\.file: .* name the file"),
        (TraceSettings(exporter="file", file="/missing/traces"), "traces: /missing/traces"),
    ],
)
async def test_what_cannot_be_exported_is_refused(settings: TraceSettings, said: str) -> None:
    """At the start, by the name of the setting."""
    with pytest.raises(SettingsError, match=said):
        async with open_tracing(settings):
            pass


@pytest.mark.parametrize(
    "url", ["collector:4318", "http://user:key@collector", "http://c/?key=1", "ftp://c", "http://"]
)
def test_an_address_with_credentials_or_without_a_host_is_refused(url: str) -> None:
    """It would be in the log of the exporter, which names it when it fails."""
    with pytest.raises(SettingsError, match="KEEPGATE_TRACES_ENDPOINT: expected a URL"):
        load(None, {"KEEPGATE_TRACES_ENDPOINT": url}, {})


async def test_a_collector_that_fails_is_told_by_no_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The header with which a collector is asked is in no line, whatever the collector answers."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=pssst-tell-nobody")
    caplog.set_level(logging.DEBUG)
    async with Collector().serving() as collector:
        collector.status = 400
        async with open_tracing(TraceSettings(exporter="otlp", endpoint=collector.url)) as tracing:
            tracing.begin({}, "request").end()
        assert collector.calls == 1
    said = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert "400" in said
    assert "pssst" not in said


def test_the_backend_logs_and_traces_as_the_gateway_does() -> None:
    """Unless its own settings say where to."""
    traces = TraceSettings(exporter="otlp", endpoint="http://collector:4318")
    given = with_telemetry(BackendSettings(), LogSettings(format="json"), traces)
    assert given.options() == ["--log-format=json", "--traces-endpoint=http://collector:4318"]
    in_file = with_telemetry(BackendSettings(), LogSettings(), TraceSettings(exporter="file", file="t"))
    assert in_file.options() == ["--traces-file=t"]
    own = BackendSettings(log_format="human", traces_file="own")
    assert with_telemetry(own, LogSettings(format="json"), traces) == own
    assert with_telemetry(BackendSettings(), LogSettings(), TraceSettings()).options() == []
