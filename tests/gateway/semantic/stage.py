"""Gateways with a semantic cache, whose service runs in the test's own event loop or as a child process."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.policy.policy import Decision, Evidence, ThresholdPolicy
from cache.semantic.service.config import Config
from cache.semantic.service.server import Service
from cache.semantic.service.service import open_service
from gateway.settings.cache import SemanticSettings
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.mock import MockUpstream
from tests.gateway.client import DEADLINE, Client
from tests.gateway.conftest import Stage
from tests.waiting import until

ASKED = "How do I reset my password?"
AGAIN = "What are the steps of a password reset?"
ONCE_MORE = "Explain how resetting a password works"
ANSWER = "Open the settings, choose Security, and click Reset password."
# Serves every answer of this similarity: these tests are about what happens then.
# An audit by chance would ask the upstream once more than a test expects.
SERVES_ALL: dict[str, Any] = {"policy": "threshold", "threshold": 0.6, "audit_share": 0.0}


class AuditsAll(ThresholdPolicy):
    """Audits every hit."""

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        return super().decide(evidence, max_risk, compares=True)


class SemanticStage:
    """Starts gateways on one service."""

    def __init__(self, stage: Stage, stack: AsyncExitStack, encoder: Encoder, folder: Path) -> None:
        self.stage = stage
        self._stack = stack
        self._encoder = encoder
        self._folder = folder
        self._services = 0

    async def service(
        self, redis: str = "", traces_endpoint: str = "", encoder: Encoder | None = None, **settings: Any
    ) -> Service:
        """A service with these semantic settings; its socket is `service.socket`."""
        used = encoder or self._encoder
        self._services += 1
        said = msgspec.structs.asdict(SemanticSettings(**settings))
        del said["mode"]
        config = msgspec.convert(
            {
                **said,
                "model_key": str(said["model_key"] or ""),
                "judge_key": "",
                "socket": str(self._folder / f"s{self._services}"),
                "redis": redis,
                "models": "",
                "traces_endpoint": traces_endpoint,
            },
            Config,
        )
        return await self._stack.enter_async_context(open_service(config, lambda *_: used))

    async def end_services(self) -> None:
        """End all services; the gateways go on without."""
        await self._stack.aclose()

    async def gateway(
        self,
        upstream: MockUpstream | UpstreamSettings,
        *,
        redis: str = "",
        mode: Literal["observe", "on"] = "on",
        service: Service | None = None,
        **more: Any,
    ) -> Client:
        """A gateway in front of one upstream; `more` are settings, those under `semantic` for the service as well."""
        semantic = {**SERVES_ALL, "deadline": 5.0, **more.pop("semantic", {})}
        if service is None:
            service = await self.service(redis, **semantic)
        return await self.stage.gateway(
            upstream,
            semantic=SemanticSettings(mode=mode, **semantic),
            semantic_socket=service.socket,
            redis=redis or "none",
            **more,
        )


async def entries(client: Client) -> int:
    """The number of entries in the semantic cache of this gateway's host."""
    stats = (await client.get("/v1/cache/stats")).json["layers"]["semantic"]
    return int(stats.get("entries", 0))


async def until_known(client: Client, count: int) -> None:
    """Return once it has `count` entries, which are added after the answers. Raises TimeoutError."""

    async def are_known() -> bool:
        return await entries(client) == count

    await until(are_known, DEADLINE)


async def figure(client: Client, name: str) -> Any:
    """A figure of the semantic cache, 0 if it has not been counted yet; a dot selects from a group."""
    figures: Any = (await client.get("/v1/cache/stats")).json["layers"]["semantic"]
    for part in name.split("."):
        figures = figures.get(part, 0)
    return figures


async def until_figure(client: Client, name: str, value: Any) -> None:
    async def has_value() -> bool:
        return bool(await figure(client, name) == value)

    await until(has_value, DEADLINE)
