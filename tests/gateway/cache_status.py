"""Cache-Status, read as the standards write it: RFC 9211 on top of structured fields (RFC 8941)."""

import re
from dataclasses import dataclass

_KEY = re.compile(r"[a-z*][a-z0-9_\-.*]*")
_TOKEN = re.compile(r"[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*")
_INTEGER = re.compile(r"-?[0-9]{1,15}(?![0-9.])")
_STRING = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')

_FWD = {"bypass", "method", "uri-miss", "vary-miss", "miss", "request", "stale", "partial"}

Value = str | int | bool


@dataclass(frozen=True, slots=True)
class Member:
    """One cache's member of the header."""

    cache: str
    parameters: dict[str, Value]

    @property
    def hit(self) -> bool:
        return self.parameters.get("hit") is True

    @property
    def fwd(self) -> Value | None:
        return self.parameters.get("fwd")

    @property
    def detail(self) -> Value | None:
        return self.parameters.get("detail")


def parse_cache_status(header: str) -> list[Member]:
    """The caches that handled a response, the one nearest to the origin first. Raises ValueError."""
    members: list[Member] = []
    rest = header.strip(" ")
    while rest:
        name, rest = _bare_item(rest)
        if not isinstance(name, str):
            raise ValueError(f"a cache is named by a token or a string, not {name!r}")
        parameters: dict[str, Value] = {}
        while rest.startswith(";"):
            rest = rest[1:].lstrip(" ")
            key, rest = _take(_KEY, rest)
            parameters[key], rest = _bare_item(rest[1:]) if rest.startswith("=") else (True, rest)
        members.append(_checked(Member(name, parameters)))
        rest = rest.lstrip(" \t")
        if rest:
            if not rest.startswith(","):
                raise ValueError(f"expected a comma before {rest!r}")
            rest = rest[1:].lstrip(" \t")
            if not rest:
                raise ValueError("a list does not end in a comma")
    return members


def _checked(member: Member) -> Member:
    """RFC 9211, section 2: hit and fwd exclude each other; each parameter has its type."""
    parameters = member.parameters
    if ("hit" in parameters) == ("fwd" in parameters):
        raise ValueError(f"either hit or fwd: {member}")
    if "fwd" in parameters and parameters["fwd"] not in _FWD:
        raise ValueError(f"no reason to forward: {member}")
    for name, kind in (("hit", bool), ("collapsed", bool), ("stored", bool), ("ttl", int), ("fwd-status", int)):
        if name in parameters and type(parameters[name]) is not kind:
            raise ValueError(f"{name} must be {kind.__name__}: {member}")
    return member


def _bare_item(text: str) -> tuple[Value, str]:
    if text[:2] in ("?0", "?1"):
        return text[1] == "1", text[2:]
    if match := _STRING.match(text):
        return re.sub(r"\\(.)", r"\1", match[1]), text[match.end() :]
    if match := _INTEGER.match(text):
        return int(match[0]), text[match.end() :]
    return _take(_TOKEN, text)


def _take(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    match = pattern.match(text)
    if match is None:
        raise ValueError(f"malformed at {text!r}")
    return match[0], text[match.end() :]
