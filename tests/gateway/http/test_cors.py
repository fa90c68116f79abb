"""Requests of web pages from other origins."""

import pytest

from tests.gateway.client import CHAT, chat
from tests.gateway.conftest import Stage

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
async def test_a_page_of_an_allowed_origin_may_ask(stage: Stage, origins: tuple[str, ...]) -> None:
    """The browser's question is answered, and a miss, a hit, a stream and an error may be read with their headers."""
    client = await stage.gateway(await stage.mock(), cors_origins=origins)
    allowed = "*" if origins == ("*",) else PAGE
    asked = await client.send("OPTIONS", CHAT, None, PREFLIGHT)
    assert asked.status == 204
    assert asked.headers["Access-Control-Allow-Origin"] == allowed
    assert asked.headers["Access-Control-Allow-Methods"] == "POST"
    assert asked.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    answers = [await client.post(body, Origin=PAGE) for body in (chat(), chat(), chat(), chat(stream=True), {})]

    assert [answer.status for answer in answers] == [200, 200, 200, 200, 400]
    assert [answer.headers.get("x-keepgate-cache") for answer in answers[:4]] == ["miss", "hit", "hit", "hit"]
    assert {answer.headers["Access-Control-Allow-Origin"] for answer in answers} == {allowed}
    assert {answer.headers["Access-Control-Expose-Headers"] for answer in answers} == {"*"}
    assert {answer.headers["Vary"] for answer in answers} == {"Origin"}


@pytest.mark.parametrize("origins", [(), ("https://other.example.org",)])
async def test_a_page_of_another_origin_may_not(stage: Stage, origins: tuple[str, ...]) -> None:
    """Nothing allows the browser to show it the answer, and its question is refused."""
    client = await stage.gateway(await stage.mock(), cors_origins=origins)
    asked = await client.send("OPTIONS", CHAT, None, PREFLIGHT)
    answers = [await client.post(chat(), Origin=PAGE) for _ in range(2)]

    assert asked.status == 405
    assert not any("Access-Control-Allow-Origin" in answer.headers for answer in (asked, *answers))
