"""A collector of traces: it takes OTLP over HTTP, and may refuse, or never answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.waiting import until


class Collector:
    """Keeps the spans that it was sent."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.hangs = False
        self.status = 200
        self.calls = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Collector"]:
        """Run it at `url`."""
        application = web.Application()
        application.router.add_post("/v1/traces", self._take)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def named(self, *names: str) -> list[Span]:
        """The first span of each of these names, once there is one."""
        await until(lambda: set(names) <= {span.name for span in self.spans}, within=10)
        return [next(span for span in self.spans if span.name == name) for name in names]

    async def _take(self, request: web.Request) -> web.Response:
        self.calls += 1
        body = await request.read()
        if self.hangs:
            await asyncio.Event().wait()
        if self.status == 200:
            export = ExportTraceServiceRequest.FromString(body)
            for resource in export.resource_spans:
                self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(status=self.status)


def attributes_of(span: Span) -> dict[str, object]:
    """The attributes of a span by name."""
    values = {attribute.key: attribute.value for attribute in span.attributes}
    return {name: getattr(value, value.WhichOneof("value") or "string_value") for name, value in values.items()}
