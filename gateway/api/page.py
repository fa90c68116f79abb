"""The page at `/`, for who opens the gateway's URL in a browser: whether it is ready, base URLs, a chat to try."""

import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web

_HTML = Path(__file__).with_name("page.html").read_bytes()


def _policy(html: bytes) -> str:
    """The Content-Security-Policy: the page's own script and style by their digests, requests to this host alone."""

    def digest(tag: bytes) -> str:
        found = re.search(rb"<%s>(.*?)</%s>" % (tag, tag), html, re.DOTALL)
        assert found is not None  # noqa: S101  # the file is part of the package
        return f"'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest(b'script')}; style-src {digest(b'style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": _policy(_HTML),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


async def show(request: web.Request) -> web.Response:
    """GET /."""
    return web.Response(body=_HTML, headers=_HEADERS)
