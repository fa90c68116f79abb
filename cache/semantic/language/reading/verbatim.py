"""What a prompt quotes or carries: quotations, code, a text to work on, addresses, symbols. Letter for letter."""

import re
from collections.abc import Sequence

from cache.semantic.language.token import Kind, Token

_QUOTED = re.compile(r"\"([^\"]*)\"|“([^“”]*)”|«([^«»]*)»|„([^„“”]*)[“”]|`([^`]*)`|(?<!\w)'([^'\n]*)'(?!\w)")
_QUOTE_SIGNS = re.compile(r"[\"“«„`]|(?<!\w)'")
# Without one of these signs a prompt has no part that must be equal but its symbols and addresses. An apostrophe
# between letters, which many prompts have, is none of them.
_SUSPICIOUS = re.compile(r"[`~{};=<>&|#(\[\n:$\"“«„]|(?<!\w)'|SELECT")
# Any of these, and the whole prompt is taken for code.
_CODE = re.compile(
    r"```|~~~|[{};]\s*\n|\{\s*\}|=>|->|==|!=|<=|>=|:=|&&|\|\||</|/>|"
    r"#include|\w\(\)|\bdef \w{1,64}\(|\bfunction\s?\w{0,64}\(|"
    r"\bimport \w{1,64}\n|\bclass \w{1,64}[:(]|\n(?: {4}|\t)\S|^\s*[$>] \S|"
    r"\w\[\w{0,20}\]|\w\+\+[;)]"
)
# Its keywords and most of its names are read in any case.
_SQL = re.compile(r"\bSELECT\s.{0,200}\sFROM\b")


def is_sql(prompt: str) -> bool:
    """Whether `prompt` has a query in it, its keywords in capitals."""
    return "SELECT" in prompt and _SQL.search(prompt) is not None


def verbatim(prompt: str, tokens: Sequence[Token]) -> tuple[str, ...]:
    """The parts of `prompt` that must be equal, in their order; all of it where it is code."""
    parts = [token.form for token in tokens if token.kind == Kind.SYMBOL or token.kind == Kind.OPAQUE]
    if not _SUSPICIOUS.search(prompt):
        return tuple(parts)
    if _CODE.search(prompt):
        return (prompt.strip(),)
    if is_sql(prompt):
        return (_folded(prompt),)
    if _QUOTE_SIGNS.search(prompt):
        parts += [part.strip() for match in _QUOTED.finditer(prompt) for part in match.groups() if part]
    payload = _payload(prompt)
    if payload:
        parts.append(payload)
    return tuple(parts)


def _payload(prompt: str) -> str:
    """What follows the first line or the first ": ", as "Summarize:" and "Translate to French: good night" have it."""
    head, newline, body = prompt.strip().partition("\n")
    _, colon, rest = head.partition(": ")
    if colon:
        return _folded(rest + newline + body)
    return _folded(body)


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold().rstrip(" .?!")
