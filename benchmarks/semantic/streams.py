"""What the semantic cache serves of streams of real questions, and how much of it is wrong, against the budget."""

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.semantic.intent_data import banking77, clinc150, embedded, half_unrepeatable, sparse
from benchmarks.semantic.peer_caches.banking import answers_of
from benchmarks.semantic.peer_caches.vcache import serve_by_vcache
from benchmarks.semantic.stream_answers import AnswerJudge
from cache.semantic.evaluation.simulation import (
    Checkpoint,
    Outcome,
    Questions,
    Stream,
    StreamJudge,
    serve_by_threshold,
    serve_in_budget,
)
from cache.semantic.policy.budget import AUDIT_SHARE
from cache.semantic.policy.policy import JudgeError
from cache.semantic.wording.comparison import VETOES

_DELTAS = (0.02, 0.01, 0.005)
_COMPARED = 0.01
_SLACK = 1.25
_ORDERS = 10
_THRESHOLDS = (0.999, *(percent / 100 for percent in range(99, 59, -1)))
# How many times the hits of the best static threshold, for each stream.
_MIN_GAIN = {"Banking77": 1.3, "CLINC150": 1.3, "sparse": 0.9}
_LONG = ("all of Banking77", "all of CLINC150")
_LONG_ORDERS = 3
_MIN_HITS = {
    "Banking77": 0.40,
    "CLINC150": 0.40,
    "half unrepeatable": 0.23,
    "sparse": 0.19,
    "all of Banking77": 0.60,
    "all of CLINC150": 0.63,
}
_MIN_HITS_OF_A_POOR_JUDGE = {"all of Banking77": 0.45, "all of CLINC150": 0.55}
_JUDGE = StreamJudge("errs", JudgeError(recall=0.98, false_same=0.01))
_POOR_JUDGE = StreamJudge("recall .90, false same .02", JudgeError(recall=0.90, false_same=0.02))
_OTHER_JUDGES = (
    StreamJudge("never errs", JudgeError(1.0, 0.0)),
    StreamJudge("recall .95, false same .005", JudgeError(recall=0.95, false_same=0.005)),
    # What a model is unsure of counts as different.
    StreamJudge("unsure of 15 %, of 50 % of what differs", JudgeError(recall=0.98 * 0.85, false_same=0.01 * 0.5)),
    StreamJudge("silent on 15 %", _JUDGE.error, silent=0.15),
)
_SAME_MISTAKES = "the same mistakes each time"
_METHOD = """\
Questions of the test splits, in {orders} random orders each; the posterior, its features and the ledger were chosen on
the training splits; what the comparison of texts adds, and how careful the policy is, had these in view. Banking77 has
{banking} requests, CLINC150 {clinc} (a hit on a question out of scope is wrong). Half unrepeatable is both together
({half}), where for every second intent each question wants an answer of its own; sparse is both together with at most a
dozen questions an intent ({sparse}). All of Banking77 ({long_banking}) and of CLINC150 ({long_clinc}) are both splits
together, in {long_orders}. Each starts with an empty cache and an ignorant policy. Embedded with the default model,
exact search, texts compared as in production. The judge of answers is simulated: recall .98, false "same" .01, which
the policy knows; audits at most {audits:.0%} of requests. "On written answers" means that the default judge compares
them: one for each intent of Banking77, with a case number where a question wants its own. "The same mistakes each time"
are drawn once for each two answers, as of a judge that compares the same two texts again and again. "Worst order" and
"mean" are over the orders. What a veto withheld is what the policy would have served without it, in half of the orders.
Gain: hits over those of the best of {thresholds} static thresholds of similarity, chosen in hindsight for each order
among those that are wrong no more often than the policy was; plain ones, without vetoes, are what other caches do.
"That are wrong in delta": against the best threshold that is wrong no more often than delta; the policy spends less
than its budget, the hindsight all of it. vCache is arXiv 2502.03771, without vetoes and storing only questions whose
answer is new, which serves it best."""


class ConsistentJudge(StreamJudge):
    """Errs as often as the judge of the table, and each time that it compares two answers in the same way."""

    def __init__(self, answers: Sequence[int], order: int) -> None:
        super().__init__(_SAME_MISTAKES, _JUDGE.error)
        self.order = order
        self._answers = answers

    def compare(self, asked: int, other: int, same: bool, chance: random.Random) -> bool:
        one, another = sorted((self._answers[asked], self._answers[other]))
        of_pair = random.Random(f"{self.order} {one} {another}")  # noqa: S311  # reproducible
        return super().compare(asked, other, same, of_pair) is True


async def measure(quick: bool) -> Figure:
    return await asyncio.to_thread(_measure, 2 if quick else _ORDERS, quick)


def _measure(orders: int, quick: bool) -> Figure:
    streams = _streams()
    rows: list[Row] = []
    for name, stream in streams.items():
        if name in _LONG:
            rows += _long_rows(name, stream, min(orders, _LONG_ORDERS))
            continue
        for delta in _DELTAS:
            runs = [_budget(stream, order, delta, _JUDGE) for order in range(orders)]
            rows += _wrong_rows(f"{name}, delta {delta}", delta, runs)
            if delta == _COMPARED:
                rows.append(_hits_row(name, runs, _MIN_HITS[name]))
                rows += _gain_rows(name, stream, [run.outcome for run in runs])
        rows += _veto_rows(name, stream, orders // 2)
        rows.append(_vcache_row(name, stream, 1 if quick else orders // 3))
        for judge in _OTHER_JUDGES:
            runs = [_budget(stream, order, _COMPARED, judge) for order in range(1 if quick else orders // 2)]
            rows += _wrong_rows(f"{name}, delta {_COMPARED}, judge {judge.name}", _COMPARED, runs)
        consistent = [ConsistentJudge(stream.answers.tolist(), order) for order in range(1 if quick else orders // 2)]
        runs = [_budget(stream, judge.order, _COMPARED, judge) for judge in consistent]
        rows += _wrong_rows(f"{name}, delta {_COMPARED}, judge {_SAME_MISTAKES}", _COMPARED, runs)
    rows += _judged_rows(orders // 2)
    sizes = [stream.size for stream in streams.values()]
    method = _METHOD.format(
        orders=orders,
        banking=sizes[0],
        clinc=sizes[1],
        half=sizes[2],
        sparse=sizes[3],
        long_banking=sizes[4],
        long_clinc=sizes[5],
        long_orders=_LONG_ORDERS,
        audits=AUDIT_SHARE,
        thresholds=len(_THRESHOLDS),
    )
    return Figure(
        figure="semantic_streams", title="Wrong answers and hits of the semantic cache", method=method, rows=tuple(rows)
    )


def _streams() -> dict[str, Stream]:
    banking, clinc = banking77("test"), clinc150("test")
    both = banking + clinc
    long = dict(zip(_LONG, (banking77("train", "test"), clinc150("train", "test")), strict=True))
    texts = list(dict.fromkeys(text for questions in long.values() for text in questions.texts))
    with tempfile.TemporaryDirectory() as folder:
        by_text = dict(zip(texts, embedded(texts, Path(folder)), strict=True))
    asked = {
        "Banking77": banking,
        "CLINC150": clinc,
        "half unrepeatable": half_unrepeatable(both),
        "sparse": sparse(both),
        **long,
    }
    return {
        name: Stream(questions, np.stack([by_text[text] for text in questions.texts]))
        for name, questions in asked.items()
    }


def _long_rows(name: str, stream: Stream, orders: int) -> list[Row]:
    rows = []
    for delta in _DELTAS:
        runs = [_budget(stream, order, delta, _JUDGE) for order in range(orders)]
        rows += _wrong_rows(f"{name}, delta {delta}", delta, runs)
        if delta == _COMPARED:
            rows.append(_hits_row(name, runs, _MIN_HITS[name]))
    runs = [_budget(stream, order, _COMPARED, _POOR_JUDGE) for order in range(orders)]
    what = f"{name}, judge {_POOR_JUDGE.name}"
    rows += _wrong_rows(f"{what}, delta {_COMPARED}", _COMPARED, runs)
    rows.append(_hits_row(what, runs, _MIN_HITS_OF_A_POOR_JUDGE[name]))
    return rows + _veto_rows(name, stream, 1)


def _judged_rows(orders: int) -> list[Row]:
    """Nothing simulated: Banking77 with an answer in words for each intent, and the judge that reads them."""
    rows = []
    banking = banking77("test")
    with tempfile.TemporaryDirectory() as folder:
        vectors = embedded(banking.texts, Path(folder))
    asked: dict[str, Questions] = {"Banking77": banking, "Banking77 half unrepeatable": half_unrepeatable(banking)}
    for name, questions in asked.items():
        stream, judge = Stream(questions, vectors), AnswerJudge(questions.texts, answers_of(questions))
        runs = [_budget(stream, order, _COMPARED, judge) for order in range(orders)]
        rows += _wrong_rows(f"{name}, delta {_COMPARED}, judge {judge.name}", _COMPARED, runs)
    return rows


def _budget(stream: Stream, order: int, delta: float, judge: StreamJudge) -> Checkpoint:
    return serve_in_budget(stream, stream.order(order), order, delta, judge).end


def _wrong_rows(what: str, delta: float, runs: Sequence[Checkpoint]) -> list[Row]:
    beside = tuple({"hits": run.outcome.hits, "audits": run.outcome.audits, "bound": run.upper} for run in runs)
    wrong = tuple(run.outcome.wrong for run in runs)
    return [
        Row(
            what=f"wrong per request, mean: {what}",
            unit="share",
            rounds=(float(np.mean(wrong)),),
            target=Target("most", delta),
            beside=({"hits": float(np.mean([run.outcome.hits for run in runs]))},),
        ),
        Row(
            what=f"wrong per request, worst order: {what}",
            unit="share",
            rounds=wrong,
            summary="maximum",
            target=Target("most", _SLACK * delta),
            beside=beside,
        ),
    ]


def _hits_row(what: str, runs: Sequence[Checkpoint], least: float) -> Row:
    return Row(
        what=f"hits, mean: {what}, delta {_COMPARED}",
        unit="share",
        rounds=(float(np.mean([run.outcome.hits for run in runs])),),
        target=Target("least", least),
    )


def _veto_rows(name: str, stream: Stream, orders: int) -> list[Row]:
    """Of each veto: how much of what the policy would have served it withheld, right and wrong."""
    counts: Counter[tuple[str, bool]] = Counter()
    for order in range(orders):
        counts += serve_in_budget(stream, stream.order(order), order, _COMPARED, _JUDGE).withheld
    asked = orders * stream.size
    return [
        Row(
            what=f"withheld by the veto {veto!r}: {name}, delta {_COMPARED}",
            unit="share of requests",
            rounds=((counts[veto, True] + counts[veto, False]) / asked,),
            beside=({"wrong": counts[veto, True] / asked, "right": counts[veto, False] / asked},),
        )
        for veto in VETOES
        if counts[veto, True] + counts[veto, False]
    ]


def _gain_rows(name: str, stream: Stream, outcomes: Sequence[Outcome]) -> list[Row]:
    rows = []
    for with_vetoes in (False, True):
        gains, gains_at_delta, beside = [], [], []
        for order, outcome in enumerate(outcomes):
            static = [serve_by_threshold(stream, stream.order(order), at, with_vetoes) for at in _THRESHOLDS]
            same_wrong, at_delta = best_within(static, outcome.wrong), best_within(static, _COMPARED)
            gains.append(_gain(outcome, same_wrong))
            gains_at_delta.append(_gain(outcome, at_delta))
            beside.append(
                {
                    "hits": outcome.hits,
                    "wrong": outcome.wrong,
                    "static": same_wrong.hits,
                    "static at delta": at_delta.hits,
                }
            )
        least = None if with_vetoes else _MIN_GAIN.get(name)
        thresholds = f"{'' if with_vetoes else 'plain '}static thresholds{' with vetoes' if with_vetoes else ''}"
        for against, found in ((thresholds, gains), (f"{thresholds} that are wrong in delta", gains_at_delta)):
            rows.append(
                Row(
                    what=f"gain over {against}: {name}, delta {_COMPARED}",
                    unit="times the hits",
                    rounds=tuple(found),
                    target=None if least is None else Target("least", least),
                    beside=tuple(beside),
                )
            )
    return rows


def best_within(outcomes: Sequence[Outcome], wrong: float) -> Outcome:
    """The most hits of those that are wrong no more often; nothing at all is always one of them."""
    return max((o for o in outcomes if o.wrong <= wrong), key=lambda o: o.hits, default=Outcome(0.0, 0.0, 0.0))


def _gain(outcome: Outcome, static: Outcome) -> float:
    # A threshold that serves nothing is as good as one that serves a single request.
    return outcome.hits / max(static.hits, 1e-4)


def _vcache_row(name: str, stream: Stream, orders: int) -> Row:
    outcomes = [serve_by_vcache(stream, stream.order(order), _COMPARED, _JUDGE, order) for order in range(orders)]
    return Row(
        what=f"hits of vCache: {name}, delta {_COMPARED}",
        unit="share",
        rounds=tuple(outcome.hits for outcome in outcomes),
        beside=tuple({"wrong": outcome.wrong} for outcome in outcomes),
    )
