"""Answers that are equal but for what nobody reads."""

import unicodedata


def equal(one: str, other: str) -> bool:
    """Whether two answers are the same text but for Unicode form, line ends, and white space where lines end.

    Case, spaces inside lines and signs count: in code they are facts.
    """
    return one == other or _canonical(one) == _canonical(other)


def _canonical(text: str) -> str:
    lines = unicodedata.normalize("NFC", text).splitlines()
    return "\n".join(line.rstrip() for line in lines).strip()
