"""Fixtures of the semantic cache's tests: an upstream with one answer, and gateways on a service."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cache.semantic.embedding.encoder import Encoder
from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.conftest import Stage
from tests.gateway.semantic.stage import ANSWER, SemanticStage


@pytest.fixture
async def semantic(stage: Stage, minilm: Encoder, folder: Path) -> AsyncIterator[SemanticStage]:
    async with AsyncExitStack() as stack:
        yield SemanticStage(stage, stack, minilm, folder)


@pytest.fixture
async def mock(stage: Stage) -> MockUpstream:
    return await stage.mock(Reply(text=ANSWER))
