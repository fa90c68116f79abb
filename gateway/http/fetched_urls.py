"""URLs in a request's body that an upstream would fetch: docs/decisions/031-security.md.

The gateway fetches none itself. An engine that fetches an image from within the operator's network is a way into that
network (SSRF, CWE-918), so URLs that lead there are refused. A name is not resolved: what it leads to when the engine
asks is not known before.
"""

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Literal

from gateway.errors import InvalidRequest

Policy = Literal["public", "any", "none"]

# Fields of a body in which there are content parts, documents or servers.
_WITH_PARTS = frozenset(
    {"messages", "input", "inputs", "documents", "query", "queries", "prompt", "images", "image", "mask", "video"}
    | {"mcp_servers", "text_1", "text_2", "system", "instructions"}
)
# Of a content part: what nobody fetches, since it is text, or what a model or a search has said before.
_NOT_FETCHED = frozenset(
    {"text", "arguments", "annotations", "citations", "action", "cache_control", "tool_calls", "function", "results"}
)
_MODELS_WORDS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use", "custom_tool_call"})
_TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking"})
_FOUND = frozenset({"web_search_result", "web_fetch_result", "search_result", "url_citation"})
_MEDIA = frozenset({"image", "video", "audio", "image_url", "video_url", "audio_url", "file_url"})
_MAX_DEPTH = 12
# What one library reads differently from another is refused.
_URL = re.compile(r"(https?)://([^/?#]*)([/?#].*)?", re.IGNORECASE)
_UNCLEAR = re.compile(r"[\x00-\x20\x7f\\]")
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::\d{0,5})?")
_NUMBER = re.compile(r"0[xX][0-9A-Fa-f]*|\d+")
_PRIVATE_NAMES = frozenset({"localhost", "local", "internal", "localdomain", "lan", "home", "corp", "intranet", "svc"})
"""Last labels of names that public DNS does not have (RFC 6761, 6762, 8375, and ICANN's .internal)."""
_LEADING_INWARD = ("nip.io", "sslip.io", "xip.io", "localtest.me", "lvh.me", "home.arpa", "in-addr.arpa", "ip6.arpa")
"""Public names that resolve to whatever address they contain, or to 127.0.0.1."""
_NETWORKS = tuple(
    map(
        ipaddress.IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
            *("203.0.113.0/24", "224.0.0.0/3", "168.63.129.16/32"),
        ),
    )
)
"""RFC 6890 and multicast; the last is Azure's service for its machines."""
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
# Of that: Teredo and other protocols, documentation (two), and 6to4, which leads to an IPv4 address.
_NETWORKS_V6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20", "2002::/16")))


class _Refused(Exception):
    """Why a URL is refused, in words that follow its name."""


def check_urls(fields: Mapping[str, Any], policy: Policy) -> None:
    """Raises InvalidRequest that names the field, for a URL that `policy` does not allow an upstream to fetch.

    `fields` is the body of a request in any form of API. `any` allows all, `none` only `data:` URLs, `public` also
    those of http and https whose host is not of a private network by what it is called.
    """
    if policy == "any":
        return
    for name in fields:
        value = fields[name]
        if isinstance(value, str):
            if name.endswith("url") or (name in _MEDIA and ":" in value):  # base64 has no colon
                _check(value, name, policy)
        elif name == "messages" and isinstance(value, list):
            _check_messages(value, policy)
        elif name == "tools" and isinstance(value, list):
            _check_tools(value, policy)
        elif name in _WITH_PARTS:
            _check_inside(value, name, policy, 0)


def _check_messages(messages: list[Any], policy: Policy) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if isinstance(content, list):
            for place, part in enumerate(content):
                if isinstance(part, dict) and _kind(part) not in _TEXTS:
                    _check_inside(part, f"messages[{number}].content[{place}]", policy, 0)
        elif isinstance(content, dict):
            _check_inside(content, f"messages[{number}].content", policy, 0)


def _check_tools(tools: list[Any], policy: Policy) -> None:
    """Of a tool its own URL and those of its options; its parameters are a schema."""
    for number, tool in enumerate(tools):
        if isinstance(tool, dict):
            for name, value in tool.items():
                if isinstance(value, str) and name.endswith("url"):
                    _check(value, f"tools[{number}].{name}", policy)
                elif name in ("input_image_mask", "container"):
                    _check_inside(value, f"tools[{number}].{name}", policy, 0)


def _check_inside(value: Any, path: str, policy: Policy, depth: int) -> None:
    """Whatever is called a URL or an image within a value, at any depth that an engine reads."""
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"'{path}' is nested too deeply.", param=path)
    if isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, dict | list):
                _check_inside(item, f"{path}[{number}]", policy, depth + 1)
    elif isinstance(value, dict):
        kind = _kind(value)
        for name, item in value.items():
            if isinstance(item, str):
                if name in _MEDIA or (name.endswith(("url", "uri")) and kind not in _FOUND):
                    _check(item, f"{path}.{name}", policy)
            elif name in _MEDIA and isinstance(item, list):
                for number, frame in enumerate(item):
                    _check_inside({name: frame}, f"{path}.{name}[{number}]", policy, depth + 1)
            elif name not in _NOT_FETCHED and not (name == "input" and kind in _MODELS_WORDS):
                _check_inside(item, f"{path}.{name}", policy, depth + 1)


def _kind(part: dict[str, Any]) -> str:
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _check(url: str, path: str, policy: Policy) -> None:
    if not url or url[:5].lower() == "data:":
        return
    try:
        if policy == "none":
            raise _Refused("must be a data: URL; others are not allowed here (security.urls)")
        _check_public(url)
    except _Refused as refusal:
        raise InvalidRequest(f"'{path}' {refusal}.", param=path, code="url_not_allowed") from None


def _check_public(url: str) -> None:
    matched = _URL.fullmatch(url)
    if matched is None or _UNCLEAR.search(url):
        raise _Refused("must be a URL of http or https without spaces and backslashes, or a data: URL")
    authority = matched[2]
    if "@" in authority:
        raise _Refused("must be a URL without a user name and a password")
    host = _AUTHORITY.fullmatch(authority)
    if host is None:
        raise _Refused("must be a URL whose host is a name in ASCII (xn--…) or an address")
    if host[1] is not None:
        is_private = _is_private_v6(host[1])
    else:
        labels = host[2].lower().rstrip(".").split(".")
        is_private = _is_private_v4(labels) if _NUMBER.fullmatch(labels[-1]) else _is_private_name(labels)
    if is_private:
        raise _Refused("must not be a URL of this machine or of a private network (security.urls)")


def _is_private_name(labels: list[str]) -> bool:
    name = ".".join(labels)
    # A name of one label is found by the search domains of the engine's own network.
    return (
        len(labels) == 1
        or labels[-1] in _PRIVATE_NAMES
        or any(name == known or name.endswith("." + known) for known in _LEADING_INWARD)
    )


def _is_private_v4(labels: list[str]) -> bool:
    """An address in any form that inet_aton(3) reads: up to four numbers, of which the last fills the rest."""
    if len(labels) > 4:
        return True
    numbers: list[int] = []
    for label in labels:
        if not _NUMBER.fullmatch(label):
            return True
        try:
            numbers.append(int(label[2:] or "0", 16) if label[:2] == "0x" else int(label, 8 if label[0] == "0" else 10))
        except ValueError:
            return True  # such as 09, in which libraries differ
    *first, last = numbers
    if any(number > 255 for number in first) or last >= 256 ** (4 - len(first)):
        return True
    value = last + sum(number << (24 - 8 * place) for place, number in enumerate(first))
    address = ipaddress.IPv4Address(value)
    # 010.0.0.1 is 8.0.0.1 for one library and 10.0.0.1 for another.
    is_plain = len(labels) == 4 and all(label == str(number) for label, number in zip(labels, numbers, strict=True))
    return not is_plain or any(address in network for network in _NETWORKS)


def _is_private_v6(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return True
    return address not in _PUBLIC_V6 or any(address in network for network in _NETWORKS_V6)
