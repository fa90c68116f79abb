"""The event loop of the servers, for the tests of what runs in it."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test of whoever imports this runs on the event loop that the gateway runs on."""
    return {"uvloop": uvloop.new_event_loop}
