"""The judge of "same answer": how often it is wrong, and how often it says nothing."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.semantic.labelled_answers import (
    DIFFERENT,
    LATER_FILE,
    SAME,
    Kind,
    Labelled,
    Pair,
    is_held_out,
    labelled,
    pairs,
)
from cache.semantic.embedding.model_files import find_model
from cache.semantic.embedding.torch_encoder import TorchEncoder
from cache.semantic.judge.answer import Answer
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.judge import Verdict

_RESAMPLES = 400
_BATCH = 64
_METHOD = """\
Labelled answers as ordered pairs (fresh, cached): the groups of benchmarks/data/answers.jsonl that coefficients and
limits of the judge were not fitted to (its features, and the rule for its limits, were chosen with a view of all), and
those of answers-later.jsonl, written when the features stood.
Recall is the share of SAME among the pairs that say the same, both kinds of wordings counting alike; that of what is
decided leaves out those of which the judge is unsure, which the policy takes for different. False same is
the share of SAME among all pairs that do not, undecided ones too. Each kind of pair stands for itself: contradicting
answers to the very same question, which one upstream hardly gives; answers to questions that differ in what matters;
answers to questions of related situations; answers to any other. The intervals hold 95 % of resamples of whole
groups, as the pairs of a group are not independent. Embeddings by all-MiniLM-L6-v2."""


class Tally(NamedTuple):
    """The verdicts on the pairs of one kind, group by group: int64 [groups, 3] in the order of Verdict."""

    counts: npt.NDArray[np.int64]

    @property
    def pairs(self) -> int:
        return int(self.counts.sum())

    def share(self, verdict: Verdict) -> float:
        """Of all pairs."""
        return float(_shares(self.counts.sum(axis=0))[_ORDER[verdict]])

    def recall(self) -> float:
        """The share of SAME among the decided."""
        return float(_recall(self.counts.sum(axis=0)))

    def share_interval(self, verdict: Verdict) -> tuple[float, float]:
        shares = [float(_shares(sums)[_ORDER[verdict]]) for sums in _resampled(self.counts)]
        return float(np.quantile(shares, 0.025)), float(np.quantile(shares, 0.975))

    def recall_interval(self) -> tuple[float, float]:
        recalls = [_recall(sums) for sums in _resampled(self.counts)]
        return float(np.quantile(recalls, 0.025)), float(np.quantile(recalls, 0.975))


_ORDER = {verdict: place for place, verdict in enumerate(Verdict)}


class Vectors:
    """Embeds texts that were all computed before, many at a time."""

    def __init__(self, encoder: TorchEncoder) -> None:
        self._encoder = encoder
        self.known: dict[str, npt.NDArray[np.float32]] = {}

    def learn(self, texts: Sequence[str]) -> None:
        new = sorted({text for text in texts if text not in self.known}, key=len)
        for start in range(0, len(new), _BATCH):
            batch = new[start : start + _BATCH]
            self.known |= dict(zip(batch, self._encoder.encode(batch), strict=True))

    async def embed(self, text: str) -> npt.NDArray[np.float32]:
        if text not in self.known:
            self.learn([text])
        return self.known[text]


def open_vectors() -> Vectors:
    files = find_model("default")
    return Vectors(TorchEncoder(files, files.fingerprint(), threads=1))


async def verdicts(vectors: Vectors, found: Sequence[Pair]) -> list[Verdict]:
    """What the default judge says of each pair, in order."""
    judge = EmbeddingJudge(vectors, kept=1 << 16)
    by_fresh: dict[tuple[str, str], list[int]] = {}
    for place, pair in enumerate(found):
        by_fresh.setdefault((pair.fresh.question, pair.fresh.answer), []).append(place)
    said: dict[int, Verdict] = {}
    for (question, answer), places in by_fresh.items():
        cached = [found[place].cached.answer for place in places]
        said |= dict(zip(places, await judge.compare(question, answer, cached), strict=True))
    return [said[place] for place in range(len(found))]


def texts_of(answers: Sequence[Labelled]) -> list[str]:
    """Whatever the judge will have embedded of these answers, and their questions."""
    passages = [passage for answer in answers for passage in Answer.of(answer.answer).passages]
    return [answer.question for answer in answers] + passages


def tallies(found: Sequence[Pair], said: Sequence[Verdict]) -> dict[Kind, Tally]:
    """The verdicts of each kind of pair that there is."""
    groups = sorted({pair.fresh.group for pair in found})
    place = {group: number for number, group in enumerate(groups)}
    counts = {kind: np.zeros((len(groups), len(Verdict)), dtype=np.int64) for kind in Kind}
    for pair, verdict in zip(found, said, strict=True):
        counts[pair.kind][place[pair.fresh.group], _ORDER[verdict]] += 1
    return {kind: Tally(count[count.sum(axis=1) > 0]) for kind, count in counts.items() if count.sum()}


async def measure(quick: bool) -> Figure:
    vectors = await asyncio.to_thread(open_vectors)
    rows: list[Row] = []
    held_out = [answer for answer in labelled() if is_held_out(answer.group)]
    for name, answers in (("held out", held_out), ("written later", labelled(LATER_FILE))):
        await asyncio.to_thread(vectors.learn, texts_of(answers))
        found = pairs(answers, vectors.known)[:: 10 if quick else 1]
        of = tallies(found, await verdicts(vectors, found))
        kinds = [kind for kind in SAME if kind in of]
        rows.append(Row(what=f"recall, {name}", unit="", rounds=(recognised(of),), target=Target("least", 0.98)))
        rows.append(Row(what=f"recall of what is decided, {name}", unit="", rounds=(recall(of),)))
        rows += [_recall_row(f"recall of what is decided, {name}, {kind.value}", of[kind]) for kind in kinds]
        rows += [_false_same_row(f"false same, {name}, {kind.value}", of[kind]) for kind in DIFFERENT]
        rows += [_unsure_row(f"unsure, {name}, {kind.value}", tally) for kind, tally in of.items()]
    return Figure(figure="semantic_judge", title="The judge of the same answer", method=_METHOD, rows=tuple(rows))


def recognised(of: dict[Kind, Tally]) -> float:
    """The share of SAME among all pairs that say the same; each kind counts alike, however many pairs it has."""
    return float(np.mean([of[kind].share(Verdict.SAME) for kind in SAME if kind in of]))


def recall(of: dict[Kind, Tally]) -> float:
    """Of the decided pairs that say the same, the share of SAME; each kind counts alike, however many pairs it has."""
    tallied = [of[kind] for kind in SAME if kind in of]
    right = sum(tally.share(Verdict.SAME) for tally in tallied)
    return right / max(1e-9, right + sum(tally.share(Verdict.DIFFERENT) for tally in tallied))


def _recall_row(what: str, tally: Tally) -> Row:
    low, high = tally.recall_interval()
    decided = 1.0 - tally.share(Verdict.UNSURE)
    beside = {"pairs": float(tally.pairs), "decided": decided, "low": low, "high": high}
    return Row(what=what, unit="", rounds=(tally.recall(),), beside=(beside,))


def _false_same_row(what: str, tally: Tally) -> Row:
    low, high = tally.share_interval(Verdict.SAME)
    beside = {"pairs": float(tally.pairs), "low": low, "high": high}
    share = tally.share(Verdict.SAME)
    return Row(what=what, unit="", rounds=(share,), target=Target("most", 0.01), beside=(beside,))


def _unsure_row(what: str, tally: Tally) -> Row:
    return Row(what=what, unit="", rounds=(tally.share(Verdict.UNSURE),))


def _shares(sums: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return sums / max(1, int(sums.sum()))


def _recall(sums: npt.NDArray[np.int64]) -> float:
    decided = int(sums[_ORDER[Verdict.SAME]] + sums[_ORDER[Verdict.DIFFERENT]])
    return float(sums[_ORDER[Verdict.SAME]]) / decided if decided else 1.0


def _resampled(counts: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    draw = np.random.default_rng(0)
    return [counts[draw.integers(0, len(counts), len(counts))].sum(axis=0) for _ in range(_RESAMPLES)]
