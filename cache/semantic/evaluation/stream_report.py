"""The report on a stream of questions, for programs and for people."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cache.semantic.embedding.encoder import Encoder, vectors_of
from cache.semantic.evaluation import simulation
from cache.semantic.evaluation.pairs import THRESHOLDS, Progress, Report, cells
from cache.semantic.evaluation.rows import AskedQuestion
from cache.semantic.normal_form.normal_form import normal_form
from cache.semantic.policy.budget import WARM_LABELS
from cache.semantic.policy.policy import JudgeError


def report_on_stream(
    asked: Sequence[AskedQuestion], encoder: Encoder, progress: Progress, delta: float, judge: JudgeError
) -> Report:
    """All figures of a stream as JSON values: of the policy with budget `delta`, and of static THRESHOLDS with vetoes.

    Shares are of the questions that reach the semantic cache. `judge` is how often who compares two answers errs.
    """
    once, other_answers = without_repeats(asked)
    texts = [question.text for question in once]
    questions = simulation.Questions.of(texts, [question.answer for question in once])
    stream = simulation.Stream(questions, vectors_of(texts, encoder, progress))
    order = np.arange(stream.size)
    run = simulation.serve_in_budget(stream, order, 0, delta, simulation.StreamJudge("simulated", judge))
    return {
        "requests": len(asked),
        "repeats": len(asked) - len(once),
        "repeats_with_other_answers": other_answers,
        "asked": stream.size,
        "answers": len(np.unique(stream.answers)),
        "model": encoder.name,
        "delta": delta,
        "judge": {"recall": judge.recall, "false_same": judge.false_same},
        "checkpoints": _checkpoints(run),
        "static": {
            f"{least:.2f}": _shares(simulation.serve_by_threshold(stream, order, least, with_vetoes=True))
            for least in THRESHOLDS
        },
        "languages": _languages([question.language for question in once], run),
        "notes": _notes(run, other_answers),
    }


def without_repeats(asked: Sequence[AskedQuestion]) -> tuple[list[AskedQuestion], int]:
    """The questions that reach the semantic cache: each the first time, in their order.

    Others are answered by the exact cache or the normal form. Also returns how many of these want another answer than
    the first time: no cache can tell.
    """
    first: dict[str, AskedQuestion] = {}
    others = 0
    for question in asked:
        others += first.setdefault(normal_form(question.text) or question.text, question).answer != question.answer
    return list(first.values()), others


def _checkpoints(run: simulation.Run) -> list[dict[str, float]]:
    """Of each checkpoint; `latest_hits` is the share of hits since the one before."""
    figures: list[dict[str, float]] = []
    before = 0
    for asked, outcome, upper in run.checkpoints:
        latest = simulation.outcome_of(run.steps[before:asked])
        figures.append({"asked": asked, "latest_hits": latest.hits, **outcome._asdict(), "bound": upper})
        before = asked
    return figures


def _languages(languages: Sequence[str], run: simulation.Run) -> dict[str, Any]:
    """By language, where the file says any: how many questions, and the shares of them."""
    figures = {}
    for language in sorted(set(languages)) if any(languages) else ():
        steps = [step for step, of in zip(run.steps, languages, strict=True) if of == language]
        figures[language or "-"] = {"asked": len(steps), **_shares(simulation.outcome_of(steps))}
    return figures


def _shares(outcome: simulation.Outcome) -> dict[str, float]:
    return {"hits": outcome.hits, "wrong": outcome.wrong}


def _notes(run: simulation.Run, other_answers: int) -> list[str]:
    notes = []
    if not run.end.outcome.hits:
        notes.append(
            f"Nothing is served before {WARM_LABELS} answers to near questions are judged, and the policy is sure"
            f" enough: {len(run.steps)} questions may be too few."
        )
    if other_answers:
        notes.append(
            f"{other_answers} of the repeated questions have another answer_id than the first time. They are left out."
        )
    return notes


def format_stream_report(report: Report) -> str:
    """The report for a person at a terminal."""
    judge, possible = report["judge"], 1 - report["answers"] / report["asked"]
    columns, shares = dict.fromkeys(("latest_hits", "hits", "wrong", "audits", "bound"), 8), {"hits": 8, "wrong": 8}
    languages = [f"{name[:8]:<8}{row['asked']:>8}{cells(row, shares)}" for name, row in report["languages"].items()]
    if languages:
        languages = ["", "by language, to the end:", "language   asked    hits   wrong", *languages]
    lines = [
        f"{report['requests']} requests, {report['repeats']} of them repeats;"
        f" {report['asked']} questions asked, {report['answers']} answers",
        f"embedded with {report['model']}",
        f"delta {report['delta']:g}; judge with recall {judge['recall']:g} and false same {judge['false_same']:g}",
        "",
        "   asked" + "".join(f"{name.partition('_')[0]:>8}" for name in columns),
        *(f"{point['asked']:>8}{cells(point, columns)}" for point in report["checkpoints"]),
        "",
        "what a fixed similarity would serve, with the vetoes, to the end:",
        *(f">= {name}{cells(row, shares)}" for name, row in report["static"].items()),
        *languages,
        "",
        "asked   questions so far, without repeats; the other columns are shares of them",
        "latest  hits of the questions since the line above",
        f"hits    answered from the cache, at most {possible:.4f}; wrong: with another answer than the right one",
        "audits  hits that are sent to the upstream as well, and compared",
        "bound   what the policy says is the most that are wrong, with 95 % confidence, from its audits alone",
        *report["notes"],
    ]
    return "\n".join(lines)
