"""The semantic cache's part of a trace."""

import asyncio

from cache.semantic.client import SemanticClient
from cache.semantic.messages import LookupMiss, LookupRequest
from tests.gateway.semantic.stage import ASKED, SERVES_ALL, SemanticStage
from tests.telemetry.tracing.collector import Collector, attributes_of

TRACE, PARENT = "a" * 32, "b" * 16


async def test_a_lookup_is_a_span_of_the_gateways_trace(semantic: SemanticStage) -> None:
    """Only where the gateway traces the request; the question is not in it."""
    async with Collector().serving() as collector:
        service = await semantic.service(traces_endpoint=collector.url, deadline=5.0, **SERVES_ALL)
        client = SemanticClient(service.socket, 5.0)
        watching = asyncio.create_task(client.watch())
        for traceparent in ("", f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{PARENT}-01"):
            reply = await client.ask(
                LookupRequest("public.p", ASKED, 1.0, key="public.a", serve=True, traceparent=traceparent), LookupMiss
            )
            assert isinstance(reply, LookupMiss)
        (span,) = await collector.named("semantic_cache.lookup")
        watching.cancel()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes_of(span) == {"keepgate.semantic.found": "none"}
    assert ASKED.encode() not in span.SerializeToString()
    assert len(collector.spans) == 1
