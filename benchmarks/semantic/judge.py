"""The judge of "same answer": how many same answers it recognises, how often it is wrong, and what it calls a poem."""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import cores, free_port, server
from benchmarks.semantic.labelled_answers import (
    AFTERWARDS_FILE,
    COMPARED,
    LATER_FILE,
    SAME,
    UNREPEATABLE_FILE,
    Kind,
    Labelled,
    Pair,
    is_held_out,
    labelled,
    pairs,
)
from cache.semantic.embedding.encoder import vectors_of
from cache.semantic.embedding.load import TorchEncoder
from cache.semantic.embedding.model_files import find_model
from cache.semantic.judge.answer import Answer, AnswerClass
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.error_rates import ErrorRates, JudgedPair
from cache.semantic.judge.judge import Judge
from cache.semantic.judge.llm_judge import open_llm_judge
from cache.semantic.judge.repeatability import disagreement_of, is_repeatable, is_unrepeatable, repeatable
from cache.semantic.policy.policy import NEIGHBOURS
from cache.semantic.policy.posterior import sigmoid

_RESAMPLES = 400


class Vectors:
    """Embeds texts that were all computed before, many at a time."""

    def __init__(self, encoder: TorchEncoder) -> None:
        self._encoder = encoder
        self.known: dict[str, npt.NDArray[np.float32]] = {}

    def learn(self, texts: Sequence[str]) -> None:
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        self.known |= dict(zip(new, vectors_of(new, self._encoder), strict=True))

    async def embed(self, text: str) -> npt.NDArray[np.float32]:
        if text not in self.known:
            self.learn([text])
        return self.known[text]


def open_vectors() -> Vectors:
    files = find_model("default")
    return Vectors(TorchEncoder(files))


def texts_of(answers: Iterable[Labelled]) -> list[str]:
    """Whatever the judge will have embedded of these answers, and their questions."""
    read = {answer.answer: Answer.of(answer.answer) for answer in answers}
    parts = [part for answer in read.values() for part in answer.passages]
    return [answer.question for answer in answers] + parts


async def scores_of(judge: Judge, found: Sequence[Pair]) -> list[float | None]:
    """What a judge says of each pair, in order."""
    by_fresh: dict[tuple[str, str], list[int]] = {}
    for place, pair in enumerate(found):
        by_fresh.setdefault((pair.fresh.question, pair.fresh.answer), []).append(place)
    said: dict[int, float | None] = {}
    for (question, answer), places in by_fresh.items():
        cached = [found[place].cached.answer for place in places]
        said |= dict(zip(places, await judge.compare("", question, answer, cached), strict=True))
    return [said[place] for place in range(len(found))]


class Asked(NamedTuple):
    """A question that was asked again and again: its vector, and the score of each answer against the one before."""

    question: str
    vector: npt.NDArray[np.float32]
    scores: list[float]


async def asked_again(
    judge: Judge, vectors: Vectors, answers: Iterable[Labelled], *, a_models_wordings: bool = False
) -> list[Asked]:
    """Each answer's wordings as if they came one after the other to the first of its questions.

    With `a_models_wordings` one answer to each question of a fact, and facts with one question are left out.
    """
    facts: dict[tuple[str, str], dict[str, list[str]]] = {}
    for answer in answers:
        facts.setdefault((answer.group, answer.fact), {}).setdefault(answer.question, []).append(answer.answer)
    found = []
    for questions in facts.values():
        first = next(iter(questions))
        texts = [given[0] for given in questions.values()] if a_models_wordings else questions[first]
        scores = [(await judge.compare("", first, new, [old]))[0] for old, new in itertools.pairwise(texts)]
        if scores:
            found.append(Asked(first, await vectors.embed(first), [score for score in scores if score is not None]))
    return found


_MODEL = "SmolLM2-135M-Instruct"
_MODEL_PAIRS = 24
_READY_DEADLINE = 120.0
_MODEL_DEADLINE = 120.0
_LEAST_RECALL, _MOST_FALSE_SAME = 0.6, 0.01
_METHOD = """\
Labelled answers as ordered pairs (fresh, cached): the groups of benchmarks/data/answers.jsonl that the judge was not
fitted to ("held out"), those of answers-later.jsonl ("written later"), and those of answers-afterwards.jsonl ("written
afterwards"). Only the coefficients are fitted without the first two: features, weights and the limit were chosen with a
view of both. The third was written after that, from a description of the form alone; with a view of it the count of
negations was added since, and earlier weights and the earlier limit taken up again.
Recall is the share of the pairs that say the same which are called so, false same that of the others; both at the limit
that was fitted to the other groups, above which lies one of 200 different answers to near questions. A model's wordings
are its answers to several wordings of a question; free wordings are as unlike as four people's. Near questions differ
in what matters, and so do their answers, often in one fact alone; related ones are of the nearest situations.
Contradicting answers to the very same question are not given by one upstream whose answers are a function of the
question; they have no target. The intervals hold 95 % of resamples of whole groups. Embeddings by all-MiniLM-L6-v2.
"As the traffic shows" means that a model's wordings of each answer come one after the other, as fresh answers to one
question, and among them those of answers-unrepeatable.jsonl, which are no function of the question: poems, jokes,
random picks. Recall is estimated as in the product; beside it its upper bound, with which the policy
reckons, and the share of all of a model's pairs that are called the same. A question is refused if its answers probably
disagree: by its own answers, each against the one before, or by those of other questions alone, as near as they are.
{model} is the model that comes with the engine, asked with the prompt of the product about {pairs} pairs of
each kind; the seconds are those of one comparison on two cores."""


async def measure(quick: bool) -> Figure:
    vectors = await asyncio.to_thread(open_vectors)
    judge = EmbeddingJudge(vectors.embed, kept=1 << 16)
    held_out = [answer for answer in labelled() if is_held_out(answer.group)]
    later, afterwards = labelled(LATER_FILE), labelled(AFTERWARDS_FILE)
    poems = [answer for answer in labelled(UNREPEATABLE_FILE) if is_held_out(answer.group)]
    await asyncio.to_thread(vectors.learn, texts_of([*held_out, *later, *afterwards, *poems]))
    rows: list[Row] = []
    for name, answers in (("held out", held_out), ("written later", later), ("written afterwards", afterwards)):
        found = pairs(answers, vectors.known)[:: 10 if quick else 1]
        rows += _rows(name, found, await scores_of(judge, found), judge.same_above)
    repeated = await asked_again(judge, vectors, [*held_out, *later], a_models_wordings=True)
    rows += _traffic_rows(repeated, await asked_again(judge, vectors, poems), judge.same_above)
    rows += await _model_rows(pairs(held_out, vectors.known), 2 if quick else _MODEL_PAIRS)
    method = _METHOD.format(model=_MODEL, pairs=_MODEL_PAIRS)
    return Figure(figure="semantic_judge", title="The judge of the same answer", method=method, rows=tuple(rows))


def _rows(name: str, found: Sequence[Pair], scores: Sequence[float | None], limit: float) -> list[Row]:
    rows = []
    for kind in Kind:
        of = [
            (pair.fresh.group, score is not None and score > limit)
            for pair, score in zip(found, scores, strict=True)
            if pair.kind is kind
        ]
        if not of:
            continue
        target = None
        if kind is Kind.CHAT:
            target = Target("least", _LEAST_RECALL)
        elif kind in COMPARED:
            target = Target("most", _MOST_FALSE_SAME)
        low, high = _interval(of)
        beside = {"pairs": float(len(of)), "low": low, "high": high}
        what = f"{'recall' if kind in SAME else 'false same'}, {name}, {kind.value}"
        rows.append(Row(what=what, unit="", rounds=(_share(of),), target=target, beside=(beside,)))
    return rows


def _share(of: Sequence[tuple[str, bool]]) -> float:
    return sum(same for _, same in of) / len(of)


def _interval(of: Sequence[tuple[str, bool]]) -> tuple[float, float]:
    """Of 95 % of resamples of whole groups, as the pairs of a group are not independent."""
    groups: dict[str, list[int]] = {}
    for group, same in of:
        sums = groups.setdefault(group, [0, 0])
        sums[0] += same
        sums[1] += 1
    counts, draw = np.array(list(groups.values())), np.random.default_rng(0)
    drawn = [counts[draw.integers(0, len(counts), len(counts))].sum(axis=0) for _ in range(_RESAMPLES)]
    shares = [same / total for same, total in drawn]
    return float(np.quantile(shares, 0.025)), float(np.quantile(shares, 0.975))


def _traffic_rows(repeated: Sequence[Asked], poems: Sequence[Asked], limit: float) -> list[Row]:
    rates = ErrorRates(limit)
    for asked in (*repeated, *poems):
        evidence = 0.0
        for score in asked.scores:
            if is_repeatable(_Question("m", "prose", evidence)):
                rates.count(JudgedPair("m", "prose", "again", score))
            elif evidence == 0.0:
                share = sigmoid(rates.unrepeatable("m", "prose") + disagreement_of(score))
                rates.count(JudgedPair("m", "prose", "first", score, share))
            evidence += disagreement_of(score)
    (of_class,) = rates.figures()
    true = float(np.mean([score > limit for asked in repeated for score in asked.scores]))
    beside = {"upper": of_class["recall_upper"], "of all pairs": true, "pairs": of_class["same_pairs"]}
    rows = [Row(what="recall as the traffic shows", unit="", rounds=(of_class["recall"],), beside=(beside,))]
    for name, questions in (("poems and random picks", poems), ("a model's wordings of one answer", repeated)):
        for most in (1, 2, 3):
            of = [is_unrepeatable(rates, _question(asked, most)) for asked in questions if len(asked.scores) >= most]
            if of:
                rows.append(_refused_row(f"refused by its own answers, {name}, {most + 1} answers", of))
        unknown, others = (_Question("m", "prose", 0.0), 1.0), [*repeated, *poems]
        of = [not repeatable(rates, [unknown, *_near(asked, others)])[0] for asked in questions]
        rows.append(_refused_row(f"refused by the answers to other questions alone, {name}", of))
    return rows


def _refused_row(what: str, refused: Sequence[bool]) -> Row:
    beside = ({"questions": float(len(refused))},)
    return Row(what=what, unit="", rounds=(float(np.mean(refused)),), beside=beside)


class _Question(NamedTuple):
    """As `Record` has it."""

    model: str
    answers: AnswerClass
    disagreement: float


def _question(asked: Asked, most: int | None = None) -> _Question:
    return _Question("m", "prose", sum(map(disagreement_of, asked.scores[:most])))


def _near(asked: Asked, others: Sequence[Asked]) -> list[tuple[_Question, float]]:
    rest = [other for other in others if other.question != asked.question]
    near = [(_question(other), float(other.vector @ asked.vector)) for other in rest]
    return sorted(near, key=lambda each: -each[1])[:NEIGHBOURS]


async def _model_rows(found: Sequence[Pair], most: int) -> list[Row]:
    """The judge that asks a model, behind the engine's own server. Raises CannotMeasure."""
    draw = random.Random(0)  # noqa: S311  # reproducible
    kinds = {kind: [pair for pair in found if pair.kind is kind] for kind in (Kind.CHAT, Kind.NEAR)}
    chosen = [pair for of in kinds.values() for pair in draw.sample(of, most)]
    port = free_port()
    command = [sys.executable, "-m", "backend", "--port", str(port), "--no-prefix-sharing"]
    async with (
        server(command, port, cores().all, patience=_READY_DEADLINE),
        open_llm_judge(f"http://127.0.0.1:{port}/v1", _MODEL, deadline=_MODEL_DEADLINE) as judge,
    ):
        await judge.compare("", "What is 1 + 1?", "2", ["It is 2."])
        began = time.monotonic()
        scores = await scores_of(judge, chosen)
        seconds = (time.monotonic() - began) / len(chosen)
    rows = []
    for kind, what in ((Kind.CHAT, "recall"), (Kind.NEAR, "false same")):
        of = [score for pair, score in zip(chosen, scores, strict=True) if pair.kind is kind]
        beside = {"pairs": float(len(of)), "no verdict": sum(s is None for s in of) / len(of), "seconds": seconds}
        share = sum(score is not None and score > 0 for score in of) / len(of)
        rows.append(Row(what=f"{what} of {_MODEL}, held out, {kind.value}", unit="", rounds=(share,), beside=(beside,)))
    return rows
