"""What a page of another origin may read."""

import pytest

from gateway.upstreams.mock import Reply
from tests.gateway.client import CHAT, chat
from tests.gateway.conftest import Stage


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", "/v1/further"])
@pytest.mark.parametrize("origins", [(), ("https://chat.example",)])
async def test_an_upstream_lets_no_page_read(stage: Stage, path: str, origins: tuple[str, ...]) -> None:
    """The gateway's cors_origins alone do, though the upstream lets everybody read."""
    mock = await stage.mock(Reply(headers={"Access-Control-Allow-Origin": "*", "x-own": "1"}))
    client = await stage.gateway(mock, cors_origins=origins)
    body = {**chat(), "prompt": "a"} | ({"input": {}} if path == "/v1/embeddings" else {})
    answer = await client.post(body, path, Origin="https://evil.example")
    assert answer.headers["x-own"] == "1"
    assert "Access-Control-Allow-Origin" not in answer.headers
    for origin in origins:
        assert (await client.post(body, path, Origin=origin)).headers["Access-Control-Allow-Origin"] == origin
