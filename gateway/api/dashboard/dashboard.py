"""The files of the dashboard. They have no data: the page asks for it, with the admin key that its user enters."""

import re
from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).parent
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_FILES = {
    path.name: (path.read_bytes(), _TYPES[path.suffix[1:]]) for path in _FOLDER.iterdir() if path.suffix[1:] in _TYPES
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


async def show(request: web.Request) -> web.Response:
    """GET /dashboard, and its files below."""
    body, content_type = _FILES[request.match_info.get("file", "index.html")]
    return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)


PARTS = tuple(sorted(name for name in _FILES if name != "index.html"))
ROUTES = (
    web.get("/dashboard", show),
    web.get(f"/dashboard/{{file:{'|'.join(map(re.escape, PARTS))}}}", show),
)
