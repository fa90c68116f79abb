"""Ids, lines, metrics and spans of requests."""

import json
import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from gateway import metrics
from gateway.settings.operations import LogSettings
from gateway.telemetry.recent_requests import RecentRequests
from gateway.telemetry.record import RECORD, RequestRecord, name_response, request_id_of
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.statistics import Statistics
from gateway.telemetry.tracing import call_attributes, operation_of, provider_of, server_attributes, usage_attributes
from telemetry.logs import CURRENT_REQUEST, JsonFormatter
from telemetry.tracing.opening import open_tracing
from telemetry.tracing.span import Tracing
from tests.telemetry.tracing.collector import Collector, attributes_of

SECRET = "pssst-tell-nobody"


def request_for(path: str = f"/v1/chat/completions?key={SECRET}", **headers: str) -> web.Request:
    return make_mocked_request("POST", path, headers={"Authorization": f"Bearer {SECRET}", **headers})


def test_a_sane_id_of_the_client_is_kept() -> None:
    """Any other is replaced by one of the gateway's, which never come twice."""
    assert request_id_of({"x-request-id": "req_A.b-1"}) == "req_A.b-1"
    others = ["", "a b", "x" * 129, "line\n", "é", "a/b"]
    made = [request_id_of({"x-request-id": text}) for text in others] + [request_id_of({}), request_id_of({})]
    assert len(set(made)) == len(made)
    assert not set(made) & set(others)


def test_an_upstreams_id_is_kept_beside_the_gateways() -> None:
    """Under a name of its own: clients report the gateway's, and a provider's support asks for the other."""
    headers = CIMultiDict({"X-Request-Id": "req_upstream"})
    record = RequestRecord("mine", "POST", "/v1/chat/completions", 0.0)
    name_response(headers, record)
    assert dict(headers) == {"x-request-id": "mine", "x-keepgate-upstream-request-id": "req_upstream"}
    name_response(headers, record)
    assert headers.getall("x-request-id") == ["mine"]


def fill(record: RequestRecord, cache: str, status: int = 200) -> None:
    record.family, record.cache, record.status, record.model = "chat.completions", cache, status, "gpt x\nERROR"
    record.prompt_tokens, record.cost, record.first_byte_at = 12, 0.0, record.began


@pytest.mark.parametrize(
    ("told", "lines"), [("none", []), ("misses", ["miss", "hit", ""]), ("all", ["miss", "hit", "hit", ""])]
)
def test_the_setting_says_which_requests_have_a_line(
    told: str, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """`misses` are those that no cache answered, and those that failed."""
    caplog.set_level(logging.INFO)
    log = RequestLog(LogSettings(requests=told), Tracing(), Statistics(None, 3600), RecentRequests(None))  # type: ignore[arg-type]  # a literal
    for cache, status in (("miss", 200), ("hit", 200), ("hit", 503), ("", 401)):
        record = log.begin(request_for())
        assert log.in_flight == 1
        fill(record, cache, status)
        log.finish(record)
    assert log.in_flight == 0
    assert [logged.__dict__["fields"].get("cache", "") for logged in caplog.records] == lines


def test_a_line_is_one_line_without_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    """In either form; a name that a client chose cannot pass for another line."""
    caplog.set_level(logging.INFO)
    log = RequestLog(LogSettings(requests="all"), Tracing(), Statistics(None, 3600), RecentRequests(None))
    request = request_for()
    record = log.begin(request)
    assert request[RECORD] is record
    assert CURRENT_REQUEST.get() is record
    fill(record, "miss")
    log.finish(record)
    (logged,) = caplog.records
    people, program = logged.getMessage(), JsonFormatter().format(logged)
    assert people.startswith("POST /v1/chat/completions 200 duration=")
    assert "model='gpt x\\nERROR'" in people
    assert "\n" not in people + program
    assert SECRET not in people + program
    fields = json.loads(program)
    assert fields["prompt_tokens"] == 12
    assert fields["cost"] == 0.0
    assert "saving" not in fields
    assert fields["request_id"] == record.request_id


def test_durations_are_counted_by_form_and_cache() -> None:
    """Of requests for an answer only."""
    log = RequestLog(LogSettings(), Tracing(), Statistics(None, 3600), RecentRequests(None))

    def counted() -> float | None:
        labels = {"family": "chat.completions", "cache": "bypass"}
        metrics.flush()
        return metrics.registry.get_sample_value("keepgate_request_duration_seconds_count", labels)

    before = counted() or 0
    fill(record := log.begin(request_for()), "bypass")
    log.finish(record)
    log.finish(log.begin(request_for()))
    assert counted() == before + 1


async def test_the_end_of_a_request_ends_its_span() -> None:
    """With its status, the cache and the costs; a failed one is marked as such."""
    async with Collector().serving() as collector, open_tracing("gateway", endpoint=collector.url) as tracing:
        log = RequestLog(LogSettings(), tracing, Statistics(None, 3600), RecentRequests(None))
        record = log.begin(request_for(traceparent=f"00-{'a' * 32}-{'b' * 16}-01"))
        record.route = "/v1/chat/completions"
        fill(record, "failed", 502)
        record.error = "upstream_unreachable"
        log.finish(record)
        (span,) = await collector.named("POST /v1/chat/completions")
    assert span.trace_id.hex() == "a" * 32
    assert span.status.code == span.status.STATUS_CODE_ERROR
    found = attributes_of(span)
    assert found["error.type"] == "upstream_unreachable"
    assert (found["http.response.status_code"], found["keepgate.cache"], found["keepgate.cost"]) == (502, "failed", 0.0)
    assert found["gen_ai.operation.name"] == "chat"
    assert SECRET.encode() not in span.SerializeToString()


def test_calls_are_named_by_the_conventions() -> None:
    """Operation and provider are those of OpenTelemetry where it has them."""
    assert [operation_of(f) for f in ("messages", "completions", "embeddings", "rerank")] == [
        "chat",
        "text_completion",
        "embeddings",
        "rerank",
    ]
    assert provider_of("https://api.anthropic.com/v1") == "anthropic"
    assert provider_of("https://team.openai.azure.com/openai/v1") == "azure.ai.openai"
    assert provider_of("http://evilapi.anthropic.com:8000/v1") == "openai"
    assert call_attributes("messages", "m", stream=True) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
    }
    assert server_attributes("http://gpu:8000/v1") == {
        "gen_ai.provider.name": "openai",
        "server.address": "gpu",
        "server.port": 8000,
    }
    assert usage_attributes(3, 4, 2, ["stop"]) == {
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["stop"],
    }
