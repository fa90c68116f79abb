"""The page at `/`: it is complete, and the browser lets it do nothing but talk to this gateway."""

import base64
import hashlib
import re

import pytest

from tests.gateway.conftest import Stage


async def test_the_page_is_served_without_a_key(stage: Stage) -> None:
    """It has no data of its own, so also a gateway with an admin key shows it; no cache keeps an old one."""
    client = await stage.gateway(await stage.mock(), admin_key="secret")
    page = await client.get("/")

    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.headers["Cache-Control"] == "no-cache"
    assert b"<title>Keepgate</title>" in page.body


async def test_the_page_loads_nothing_from_elsewhere(stage: Stage) -> None:
    """Everything is in the one file, so it works without a network."""
    page = (await (await stage.gateway(await stage.mock())).get("/")).body.decode()
    assert re.findall(r"""(?:src|href)=["'](?!/|data:)[^"']*""", page) == []
    assert re.findall(r"url\(|@import|https?://", page) == []


@pytest.mark.parametrize("tag", ["script", "style"])
async def test_the_policy_allows_the_pages_own_code_alone(stage: Stage, tag: str) -> None:
    """The digest in the Content-Security-Policy is that of the tag in the page (CSP Level 3, section 6.7)."""
    page = await (await stage.gateway(await stage.mock())).get("/")
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.body.decode(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    policy = page.headers["Content-Security-Policy"]
    assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"\son\w+=", page.body.decode()), "no handler in an attribute, which the policy would refuse"
