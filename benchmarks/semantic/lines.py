"""How many lines of code the semantic cache has, beside those of the version with word lists."""

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from benchmarks.harness.machine import git
from benchmarks.harness.measurement import Figure, Row, Target

FOLDER = "cache/semantic"
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
ADDED = {
    "embeddings from servers": (
        *("embedding/server.py", "embedding/errors.py:ModelChanged", "evaluation/check.py:_check_server"),
    ),
    "records of another embedding model, embedded in the background": (
        *("service/sharing.py:Sharing.reembed", "service/sharing.py:Sharing.reembedding"),
        *("service/neighbours.py:Neighbours.complete",),
    ),
    "a threshold of a request's own": ("service/semantic_cache.py:SemanticCache._policy",),
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
        *("policy/policy.py:Policy.names_to_join", "policy/policy.py:Policy.join", "policy/policy.py:Policy.name_of"),
        *("policy/budget.py:BudgetPolicy.names_to_join", "policy/budget.py:BudgetPolicy.join"),
        *("policy/budget.py:BudgetPolicy.name_of", "policy/calibration.py:WrongAnswerRisk.rename"),
        *("policy/calibration.py:WrongAnswerRisk.copy", "policy/calibration.py:WrongAnswerRisk._raise_to"),
    ),
    "decisions, their features, and other deltas, for operators": (
        *("inspection", "service/semantic_cache.py:_shown", "messages.py:RiskFeature"),
        *("messages.py:SemanticDecision", "messages.py:DecisionsRequest", "messages.py:DecisionsReply"),
        *("messages.py:WhatIfPoint", "messages.py:WhatIfAccount", "messages.py:WhatIfRequest"),
        *("messages.py:WhatIfReply", "policy/policy.py:Policy.features", "policy/budget.py:BudgetPolicy.features"),
    ),
    "figures of the embedder, for operators": ("embedding/embedder.py:Embedders.figures",),
    "streams of people's own logs, and their simulation": (
        *("evaluation/simulation.py", "evaluation/stream_report.py"),
        *("evaluation/rows.py:AskedQuestion", "evaluation/rows.py:_json_lines"),
    ),
}
"""For what the version before could not do: files, folders, and definitions ("file:name") in files that it had too."""
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)
_METHOD = """\
Lines of the Python code of cache/semantic, without blanks, comments and docstrings, in the commit that is checked out
and in {before:.8}, the last one in which lists of English words compared texts. "Without what is new" leaves out the
files and definitions that are for what it could not do; each purpose has a row at the end. (The simulation of streams
was among the benchmarks then, with about as many lines.) Of functions that do both all lines count. What that version
did and this one does not, such as the policy vCache and the export to ONNX Runtime, is not taken off the count before:
leaving something out is one way to have fewer lines. The list of English words and the C++ of the compiled encoder are
counted nowhere."""


async def measure(quick: bool) -> Figure:
    now, before = await _sources("HEAD"), await _sources(_BEFORE)
    added = {purpose: set().union(*(code_of(now, name) for name in names)) for purpose, names in ADDED.items()}
    count, count_before = _count(now, ("",)), _count(before, ("",))
    half = Target("most", 0.5)
    kept = count - sum(map(len, added.values()))
    rows = [_row("all", count, count_before, half), _row("without what is new", kept, count_before, half)]
    rows += [_row(part, _count(now, names), _count(before, names)) for part, names in _PARTS.items()]
    rows += [_row(f"new: {purpose}", len(lines), 0) for purpose, lines in added.items()]
    method = _METHOD.format(before=_BEFORE)
    return Figure(figure="semantic_lines", title="Lines of code of the semantic cache", method=method, rows=tuple(rows))


async def _sources(commit: str) -> dict[str, str]:
    """By file, named from the folder on. Raises CannotMeasure if the commit is not there."""
    paths = (await git("ls-tree", "-r", "--name-only", commit, f"{FOLDER}/")).splitlines()
    return {
        path.removeprefix(f"{FOLDER}/"): await git("show", f"{commit}:{path}") for path in paths if path.endswith(".py")
    }


def _count(sources: Mapping[str, str], names: Iterable[str]) -> int:
    """The lines of code of files and folders; of those that are not there, none."""
    return sum(
        len(lines_of_code(source))
        for path, source in sources.items()
        if any(map(PurePosixPath(path).is_relative_to, names))
    )


def code_of(sources: Mapping[str, str], name: str) -> set[tuple[str, int]]:
    """The lines of code, as file and number, of a file, a folder, or a definition ("file:name").

    Raises LookupError where there are none.
    """
    path, _, definition = name.partition(":")
    found = set()
    for file, source in sources.items():
        if PurePosixPath(file).is_relative_to(path):
            lines = lines_of_code(source)
            if definition:
                lines.intersection_update(lines_of_definition(source, definition))
            found |= {(file, line) for line in lines}
    if not found:
        raise LookupError(f"there is no {name}")
    return found


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
