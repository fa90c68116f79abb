"""Calls of a model at a server with one of OpenAI's APIs."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp


class BadReply(ValueError):
    """The message says what was wrong with a reply, without the texts; `status` is its HTTP status."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


def endpoint(url: str, path: str) -> str:
    """The URL of a path such as "chat/completions"; `url` may lack it, and ``/v1`` (or another version) before it."""
    parts = urlsplit(url)
    base = parts.path.rstrip("/")
    if not base.endswith(f"/{path}"):
        base += f"/{path}" if re.search(r"/v\d+\Z", base) else f"/v1/{path}"
    return urlunsplit(parts._replace(path=base, fragment=""))


async def post(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str], most: int
) -> bytes:
    """The reply to a JSON body. Raises BadReply unless its status is 200 and it has `most` bytes at most."""
    # A redirect would send texts and key to a host that the operator did not name.
    async with session.post(url, json=body, headers=headers, allow_redirects=False) as response:
        if response.status != 200:
            raise BadReply(f"status {response.status}", response.status)
        # A read may return less than requested, so the limit is on all of them together.
        received = bytearray()
        async for chunk in response.content.iter_any():
            received += chunk
            if len(received) > most:
                raise BadReply("the reply is too long")
    return bytes(received)
