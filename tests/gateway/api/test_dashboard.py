"""The dashboard: complete, small, and allowed to talk to this gateway alone; tests/clients tries it in a browser."""

import re

import pytest

from gateway.api.dashboard.dashboard import PARTS
from tests.gateway.conftest import Stage

_MOST_BYTES = 300_000


async def test_the_page_is_served_without_a_key(stage: Stage) -> None:
    """It has no data of its own, so also a gateway with an admin key shows it."""
    client = await stage.gateway(await stage.mock(), admin_key="secret")
    page = await client.get("/dashboard")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"<title>Keepgate dashboard</title>" in page.body


async def test_everything_it_names_is_served_and_small(stage: Stage) -> None:
    """Each file, of its type; all of them together are below 300 KB."""
    client = await stage.gateway(await stage.mock())
    page = (await client.get("/dashboard")).body
    named = re.findall(rb"""(?:src|href)="(/dashboard/[^"]+)""", page)
    assert {name.decode().removeprefix("/dashboard/") for name in named} == set(PARTS)
    files = [await client.get(name.decode()) for name in named]
    assert [file.status for file in files] == [200] * len(files)
    assert {file.headers["Content-Type"] for file in files} == {
        "text/javascript; charset=utf-8",
        "text/css; charset=utf-8",
    }
    assert len(page) + sum(len(file.body) for file in files) < _MOST_BYTES


async def test_it_loads_nothing_from_elsewhere(stage: Stage) -> None:
    """So it works without a network, and the browser refuses anything else."""
    client = await stage.gateway(await stage.mock())
    page = await client.get("/dashboard")
    own = [await client.get(f"/dashboard/{name}") for name in PARTS if not name.startswith("uPlot")]
    for file in (page, *own):
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")  # the name of a namespace
        assert re.findall(r"url\(|@import|https?://|\son\w+=|innerHTML", text) == []
    assert re.findall(rb"""(?:src|href)=["'](?!/|data:|#)[^"']*""", page.body) == []
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    "path", ["/dashboard/uPlot.LICENSE", "/dashboard/../pyproject.toml", "/dashboard/", "/dashboard/x"]
)
async def test_nothing_else_is_served(stage: Stage, path: str) -> None:
    """Other names are not found."""
    client = await stage.gateway(await stage.mock())
    assert (await client.get(path)).status == 404
