"""The findings as a table for people, and as JSON for machines."""

import textwrap
from collections import Counter
from collections.abc import Sequence

import msgspec

from gateway import __version__
from gateway.commands.doctor.finding import Finding, Status

_MARKS: dict[Status, str] = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}
_MIN_WIDTH, _MAX_WIDTH = 60, 140


def worst_of(findings: Sequence[Finding]) -> Status:
    """The most severe status among the findings."""
    statuses = {finding.status for finding in findings}
    return next((status for status in ("problem", "warning") if status in statuses), "ok")


def as_json(findings: Sequence[Finding]) -> str:
    """An object with `version`, `status` and `findings`."""
    report = {"version": __version__, "status": worst_of(findings), "findings": findings}
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def as_table(findings: Sequence[Finding], width: int | None = None) -> str:
    """A line for each finding, what to do below those that are not ok, and the counts last.

    `width` is that of the terminal in characters; with None no line is broken.
    """
    marks = max(map(len, _MARKS.values()))
    names = max((len(finding.check) for finding in findings), default=0)
    indent = " " * (marks + names + 4)
    lines: list[str] = []
    for finding in findings:
        head = f"{_MARKS[finding.status]:<{marks}}  {finding.check:<{names}}  "
        lines += _wrapped(finding.summary, head, indent, width)
        if finding.advice:
            lines += _wrapped(finding.advice, f"{indent}→ ", f"{indent}  ", width)
    return "\n".join([*lines, "", _counts(findings)])


def _wrapped(text: str, first: str, others: str, width: int | None) -> list[str]:
    if width is None:
        return [first + text]
    return textwrap.wrap(
        text,
        min(max(width, _MIN_WIDTH), _MAX_WIDTH),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _counts(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    said = [f"{counts[status]} {status}{'s' if counts[status] != 1 else ''}" for status in ("problem", "warning")]
    return f"{', '.join(said)}, {counts['ok']} ok"
