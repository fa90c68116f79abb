"""How many lines of code the semantic cache has, beside those of the version with word lists."""

import ast
import io
import tokenize
from collections.abc import Mapping
from pathlib import PurePosixPath

from benchmarks.harness.machine import git
from benchmarks.harness.measurement import Figure, Row, Target

_FOLDER = "cache/semantic"
_BEFORE = "667a329474837e0c675637111c9bc8f92a11d7ea"
"""The last commit in which thirteen vetoes with lists of English words compared texts."""
_PARTS = {
    "comparing texts": ("guards", "language", "normal_form", "wording"),
    "embedding": ("embedding", "model_server.py"),
    "index": ("index",),
    "judge": ("judge",),
    "policy": ("policy",),
    "service, messages, client": ("__init__.py", "client.py", "messages.py", "question.py", "service"),
    "evaluation": ("evaluation",),
    "inspection": ("inspection",),
}
_ADDED = (
    *("embedding/server.py", "evaluation/simulation.py", "evaluation/stream_report.py", "index/recall.py"),
    *("inspection", "judge/error_rates.py", "judge/repeatability.py"),
)
_NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)
_METHOD = """\
Lines of the Python code of cache/semantic, without blanks, comments and docstrings, in the commit that is checked out
and in {before:.8}, the last one in which lists of English words compared texts. "Without what is new" leaves out
what that version could not do at all: embeddings from servers, streams of people's own logs, a recall that is watched,
what operators see of decisions, errors of the judge that are measured, and answers that are no function of their
question ({added})."""


async def measure(quick: bool) -> Figure:
    now, before = await _lines("HEAD"), await _lines(_BEFORE)
    kept = {path: count for path, count in now.items() if not any(map(PurePosixPath(path).is_relative_to, _ADDED))}
    half = Target("most", 0.5)
    rows = [_row("all", now, before, half), _row("without what is new", kept, before, half)]
    for part, names in _PARTS.items():
        rows.append(_row(part, _of(now, names), _of(before, names)))
    method = _METHOD.format(before=_BEFORE, added=", ".join(_ADDED))
    return Figure(figure="semantic_lines", title="Lines of code of the semantic cache", method=method, rows=tuple(rows))


async def _lines(commit: str) -> dict[str, int]:
    """Lines of code by file, named from the folder on. Raises CannotMeasure if the commit is not there."""
    paths = (await git("ls-tree", "-r", "--name-only", commit, f"{_FOLDER}/")).splitlines()
    return {
        path.removeprefix(f"{_FOLDER}/"): lines_of_code(await git("show", f"{commit}:{path}"))
        for path in paths
        if path.endswith(".py")
    }


def _of(lines: Mapping[str, int], names: tuple[str, ...]) -> dict[str, int]:
    return {path: count for path, count in lines.items() if path.partition("/")[0] in names}


def _row(what: str, now: Mapping[str, int], before: Mapping[str, int], target: Target | None = None) -> Row:
    lines, lines_before = sum(now.values()), sum(before.values())
    return Row(
        what=what,
        unit="of the lines before" if lines_before else "lines",
        rounds=(lines / lines_before if lines_before else lines,),
        target=target,
        beside=({"lines": lines, "before": lines_before},),
    )


def lines_of_code(source: str) -> int:
    """Lines with code of a Python source: blanks, comments and docstrings are none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    counted = {
        line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())):  # a docstring, also of an attribute
                counted.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(counted)
