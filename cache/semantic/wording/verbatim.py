"""What a question quotes or carries: quotations, code, a text to work on, addresses, identifiers."""

import re

UNDIVIDED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Scripts that do not divide words: Thai to Burmese, Khmer, Chinese and Japanese. Each sign counts as a word."""

_SIGN = re.compile(f"[{UNDIVIDED}]")
_QUOTED = re.compile(
    r"\"([^\"]*)\"|“([^“”]*)”|«([^«»]*)»|„([^„“”]*)[“”]|「([^「」]*)」|『([^『』]*)』|`([^`]*)`|(?<!\w)'([^'\n]*)'(?!\w)"
)
# Any of these, and the whole text is taken for code.
_CODE = re.compile(
    r"```|~~~|[{};]\s*\n|\{\s*\}|=>|->|==|!=|<=|>=|:=|&&|\|\||</|/>|"
    r"#include|\w\(\)|\bdef \w{1,64}\(|\bfunction\s?\w{0,64}\(|"
    r"\bimport \w{1,64}\n|\bclass \w{1,64}[:(]|\n(?: {4}|\t)\S|^\s*[$>] \S|"
    r"\w\[\w{0,20}\]|\w\+\+[;)]|\bSELECT\s.{0,200}\sFROM\b"
)
_OPAQUE = re.compile(
    r"://|^www\.|[^@\s]@[^@\s]+\.|^[~.]{0,2}/[^/]+/|^[a-zA-Z]:\\|\\\w|[^\W_]_+[^\W_]|[^\W\d_][a-z][A-Z]|^[\w.+-]*\w\.\w+\.\w"
)
# None of these signs, and no part has to be equal. An apostrophe between letters, which many questions have, is none.
_SUSPICIOUS = re.compile(r"[`~{}\[;=<>&|#(\n:\uff1a\"“«„「『@/\\_]|(?<!\w)'|SELECT|[a-z][A-Z]|\w\.\w")
# With the full-width signs of Chinese and Japanese: ideographic comma and full stop, then , ; : ! ? ( ).
_STRIPPED = ".,;:!?\"'()…“”«»「」『』\u3001\u3002\uff0c\uff1b\uff1a\uff01\uff1f\uff08\uff09"
_COLON = re.compile(r": |(?<!\d)\uff1a")
# A longer part is not sought among the words: it is a text, not a quotation.
_MAX_WORDS = 24


def verbatim(text: str) -> tuple[str, ...]:
    """The parts of `text` that must be equal, in their order; all of it where it is code."""
    if not _SUSPICIOUS.search(text):
        return ()
    if _CODE.search(text):
        return (text.strip(),)
    parts = [chunk.strip(_STRIPPED) for chunk in _SIGN.sub(" ", text).split() if _OPAQUE.search(chunk)]
    parts += [part.strip() for match in _QUOTED.finditer(text) for part in match.groups() if part]
    if payload := _payload(text):
        parts.append(payload)
    return tuple(parts)


def are_said(parts: tuple[str, ...], written: str) -> bool:
    """Whether all of `parts` stand in a text: plain words may be quoted in one text and not in the other."""
    said = f" {' '.join(word.strip(_STRIPPED) for word in _divided(written))} "
    return all(
        0 < len(sought) <= _MAX_WORDS
        and all(word.replace("'", "").isalpha() for word in sought)
        and f" {' '.join(sought)} " in said
        for sought in map(_divided, parts)
    )


def _divided(text: str) -> list[str]:
    return _SIGN.sub(r" \g<0> ", text.casefold()).split()


def _payload(text: str) -> str:
    """What follows the first line or the first ": ", as "Summarize:" and "Translate to French: good night" have it."""
    head, newline, body = text.strip().partition("\n")
    _, *rest = _COLON.split(head, maxsplit=1)
    return " ".join((rest[0] + newline + body if rest else body).split()).rstrip(" .?!\u3002\uff1f\uff01")
