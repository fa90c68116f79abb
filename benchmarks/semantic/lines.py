"""How many lines of code the semantic cache has, beside those of the version with word lists."""

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
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
_ADDED = {
    "embeddings from servers": (
        *("embedding/server.py", "embedding/errors.py:ModelChanged", "evaluation/check.py:_check_server"),
    ),
    "vectors computed anew for another model": (
        *("service/sharing.py:Sharing.reembed", "service/sharing.py:Sharing.reembedding"),
        *("service/sharing.py:Sharing._complete", "service/sharing.py:Sharing._embedded"),
        "service/neighbours.py:Neighbours.complete",
    ),
    "a recall of the index that is watched": ("index/recall.py",),
    "errors of the judge that the traffic shows": (
        *("judge/error_rates.py", "judge/answer.py:class_of", "judge/embedding_judge.py:coefficients_digest"),
        *("policy/policy.py:JudgeError.toward", "policy/policy.py:JudgeError.really_wrong"),
        *("service/learner.py:Learner._measure", "service/learner.py:Learner._score"),
        *("service/learner.py:Learner._unrelated", "service/learner.py:Learner._earlier"),
        *("service/answers.py:Answers.earlier", "service/service.py:judge_name"),
    ),
    "answers that are no function of their question": ("judge/repeatability.py",),
    "names of equal answers that are joined": (
        *("policy/groups.py", "policy/policy.py:EqualAnswers", "service/learner.py:Learner._join"),
        *("policy/policy.py:Policy.names_to_join", "policy/policy.py:Policy.join"),
        *("policy/budget.py:BudgetPolicy.names_to_join", "policy/budget.py:BudgetPolicy.join"),
        *("policy/calibration.py:WrongAnswerRisk.rename", "policy/calibration.py:WrongAnswerRisk.copy"),
    ),
    "decisions, their features, and other deltas, for operators": (
        *("inspection", "service/semantic_cache.py:_shown", "messages.py:RiskFeature"),
        *("messages.py:SemanticDecision", "messages.py:DecisionsRequest", "messages.py:DecisionsReply"),
        *("messages.py:WhatIfPoint", "messages.py:WhatIfAccount", "messages.py:WhatIfRequest"),
        *("messages.py:WhatIfReply", "policy/policy.py:Policy.features", "policy/budget.py:BudgetPolicy.features"),
    ),
    "streams of people's own logs": (
        *("evaluation/simulation.py", "evaluation/stream_report.py"),
        *("evaluation/rows.py:AskedQuestion", "evaluation/rows.py:_json_lines"),
    ),
}
"""What the version before could not do at all: files, folders, and definitions in files that it had in some form."""
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)
_METHOD = """\
Lines of the Python code of cache/semantic, without blanks, comments and docstrings, in the commit that is checked out
and in {before:.8}, the last one in which lists of English words compared texts. "What that version did" leaves out
the files and definitions that are for what it could not do at all; each has a row of its own at the end. Of functions
that do both all lines count."""


async def measure(quick: bool) -> Figure:
    now, before = await _lines("HEAD"), await _lines(_BEFORE)
    added = {function: await _added(now, names) for function, names in _ADDED.items()}
    count, count_before = sum(now.values()), sum(before.values())
    half = Target("most", 0.5)
    rows = [
        _row("all", count, count_before, half),
        _row("what that version did", count - sum(added.values()), count_before, half),
    ]
    rows += [_row(part, _of(now, names), _of(before, names)) for part, names in _PARTS.items()]
    rows += [_row(f"new: {function}", lines, 0) for function, lines in added.items()]
    method = _METHOD.format(before=_BEFORE)
    return Figure(figure="semantic_lines", title="Lines of code of the semantic cache", method=method, rows=tuple(rows))


async def _lines(commit: str) -> dict[str, int]:
    """Lines of code by file, named from the folder on. Raises CannotMeasure if the commit is not there."""
    paths = (await git("ls-tree", "-r", "--name-only", commit, f"{_FOLDER}/")).splitlines()
    return {
        path.removeprefix(f"{_FOLDER}/"): len(lines_of_code(await git("show", f"{commit}:{path}")))
        for path in paths
        if path.endswith(".py")
    }


async def _added(now: Mapping[str, int], names: Iterable[str]) -> int:
    """Lines of code of files, folders and definitions ("file:name"), of which there is each one."""
    lines = 0
    for name in names:
        path, _, definition = name.partition(":")
        if definition:
            source = await git("show", f"HEAD:{_FOLDER}/{path}")
            lines += len(lines_of_code(source).intersection(lines_of_definition(source, definition)))
        else:
            lines += sum(count for file, count in now.items() if PurePosixPath(file).is_relative_to(path))
    return lines


def _of(lines: Mapping[str, int], names: tuple[str, ...]) -> int:
    return sum(count for path, count in lines.items() if path.partition("/")[0] in names)


def _row(what: str, lines: int, before: int, target: Target | None = None) -> Row:
    return Row(
        what=what,
        unit="of the lines before" if before else "lines",
        rounds=(lines / before if before else lines,),
        target=target,
        beside=({"lines": lines, "before": before},),
    )


def lines_of_code(source: str) -> set[int]:
    """The numbers of the lines with code of a Python source: blanks, comments and docstrings are none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    counted = {
        line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())):  # a docstring, also of an attribute
                counted.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return counted


def lines_of_definition(source: str, name: str) -> range:
    """The lines of a class or function, named as in `Class.function`, with its decorators. Raises LookupError."""
    body = ast.parse(source).body
    for part in name.split("."):
        named = (node for node in body if isinstance(node, _Definition) and node.name == part)
        if (found := next(named, None)) is None:
            raise LookupError(f"there is no {name}")
        body, lines = found.body, [found.lineno, *(each.lineno for each in found.decorator_list), found.end_lineno or 0]
    return range(min(lines), max(lines) + 1)
