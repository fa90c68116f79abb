"""Questions in German, Spanish and Chinese beside the same ones in English: what their answers' lookups lose."""

import asyncio
import csv
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.harness.measurement import RATIO, Beside, Figure, Row, Target
from benchmarks.harness.processes import DATA, CannotMeasure
from cache.semantic.embedding.embedder import open_embedders
from cache.semantic.embedding.encoder import Vectors, vectors_of
from cache.semantic.embedding.errors import EmbeddingFailed, ModelUnusable
from cache.semantic.embedding.load import load_encoder
from cache.semantic.embedding.model_files import models_folder
from cache.semantic.embedding.server import EmbeddingServer
from cache.semantic.evaluation.pairs import Flags, figures_of, served_by_policy
from cache.semantic.policy.posterior import evidence_of
from cache.semantic.wording.comparison import compare
from cache.semantic.wording.text import Text

MODEL, URL, PROMPT = "KEEPGATE_BENCH_MODEL", "KEEPGATE_BENCH_MODEL_URL", "KEEPGATE_BENCH_MODEL_PROMPT"
_LANGUAGES = {"en": "English", "de": "German", "es": "Spanish", "zh": "Chinese"}
_DEFAULT = "all-MiniLM-L6-v2"
_DELTA = 0.01
_WRONG = 0.02
_LEAST = 0.8
_AREA = "area under the ROC curve"
_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)
_BATCH = 16
_START_DEADLINE, _CALL_DEADLINE = 30.0, 60.0
_METHOD = """\
{pairs} pairs of real questions of Banking77 and CLINC150, and the same translated one by one into German, Spanish and
Chinese (benchmarks/data/semantic/languages.csv): {same} that one answer is right for, {different} near neighbours that
need two. Lookups: each question of the {same} is looked up twice among the partners of all, once with its own, which is
right to serve, and once for the nearest of another intent of its data set, which is wrong. "Own answer is nearest": its
partner is nearer than that one. Recall at {wrong:.0%} wrong: the share of partners that the best threshold of
similarity serves, chosen in hindsight for each language, where it serves at most {wrong:.0%} of the wrong ones; "with
vetoes" without those that the comparison of wording forbids. A language's figure is divided by English's with the same
model; the interval is of {resamples:,} samples of the {same} questions with repetition, the same ones in both
languages. Policy: both kinds of lookups in the cross-validation of `keepgate eval-pairs` with delta {delta:g}. Near
neighbours are the {pairs} pairs as they stand. Those that differ were chosen among the questions that {default} has
nearest, and similarity hardly tells them from the others in any language: the vetoes and what the traffic teaches have
to. The multilingual model is {model}; {default} is English."""
_Floats = npt.NDArray[np.float32]
_ByText = dict[str, _Floats]


class _Pair(NamedTuple):
    cached: str
    asked: str
    same: bool
    intent: str


class _Lookups(NamedTuple):
    """Of each question: similarity of its partner and of the nearest other, and whether they pass the vetoes; [n]."""

    right: _Floats
    wrong: _Floats
    right_passes: Flags
    wrong_passes: Flags

    def at(self, places: npt.NDArray[np.intp]) -> "_Lookups":
        return _Lookups(self.right[places], self.wrong[places], self.right_passes[places], self.wrong_passes[places])


async def measure(quick: bool) -> Figure:
    name = os.environ.get(MODEL)
    if not name:
        raise CannotMeasure(
            f"A multilingual embedding model is needed: {MODEL} names a folder of sentence-transformers, or a model of"
            f" the server with OpenAI's embeddings API whose URL is {URL}; {PROMPT} is put before each question."
        )
    pairs = _pairs()
    texts = list(dict.fromkeys(text for each in pairs.values() for pair in each for text in (pair.cached, pair.asked)))
    rows = _veto_rows(pairs)
    for shown, vectors in (("", await _vectors(texts, name)), (f", {_DEFAULT}", await _here(texts, "default", None))):
        by_text = dict(zip(texts, vectors, strict=True))
        rows += _rows(shown, pairs, by_text, 100 if quick else _RESAMPLES)
    english = pairs["en"]
    same = sum(pair.same for pair in english)
    method = _METHOD.format(
        pairs=len(english),
        same=same,
        different=len(english) - same,
        wrong=_WRONG,
        delta=_DELTA,
        resamples=_RESAMPLES,
        default=_DEFAULT,
        model=name,
    )
    return Figure(figure="semantic_languages", title="Questions in other languages", method=method, rows=tuple(rows))


def _pairs() -> dict[str, list[_Pair]]:
    """The pairs of each language, all in one order."""
    found: dict[str, list[_Pair]] = {language: [] for language in _LANGUAGES}
    with (DATA / "semantic" / "languages.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[row["lang"]].append(_Pair(row["text_a"], row["text_b"], row["label"] == "1", row["intent_b"]))
    return found


async def _vectors(texts: Sequence[str], name: str) -> Vectors:
    prompt, url = os.environ.get(PROMPT), os.environ.get(URL)
    return await (
        _of_server(texts, EmbeddingServer(url, name, prompt=prompt or "")) if url else _here(texts, name, prompt)
    )


async def _here(texts: Sequence[str], name: str, prompt: str | None) -> Vectors:
    try:
        return await asyncio.to_thread(lambda: vectors_of(texts, load_encoder(name, models_folder(), prompt=prompt)))
    except ModelUnusable as error:
        raise CannotMeasure(f"{MODEL}: {error}") from error


async def _of_server(texts: Sequence[str], server: EmbeddingServer) -> Vectors:
    batches = [texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH)]
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_START_DEADLINE):
                opened = open_embedders(server, _CALL_DEADLINE * len(texts), _CALL_DEADLINE)
                lookups = (await stack.enter_async_context(opened)).lookups
            found = [each for batch in batches for each in await asyncio.gather(*map(lookups.embed, batch))]
        except TimeoutError as error:
            raise CannotMeasure(f"{URL}: {server.name} gave no vector within {_START_DEADLINE:g} s.") from error
        except EmbeddingFailed as error:
            raise CannotMeasure(f"{URL}: {error}") from error
    return np.stack(found)


def _veto_rows(pairs: dict[str, list[_Pair]]) -> list[Row]:
    rows = []
    for language, name in _LANGUAGES.items():
        for same, kind in ((True, "same"), (False, "different")):
            vetoed = [_is_vetoed(pair.cached, pair.asked) for pair in pairs[language] if pair.same == same]
            rows.append(
                Row(what=f"{name}: near neighbours vetoed, {kind}", unit="share", rounds=(float(np.mean(vetoed)),))
            )
    return rows


def _rows(shown: str, pairs: dict[str, list[_Pair]], vectors: _ByText, resamples: int) -> list[Row]:
    lookups = {language: _lookups([pair for pair in each if pair.same], vectors) for language, each in pairs.items()}
    rows = []
    for what, figure in _FIGURES.items():
        english = figure(lookups["en"])
        rows.append(Row(what=f"English: {what}{shown}", unit="share", rounds=(english,)))
        for language, name in list(_LANGUAGES.items())[1:]:
            found = figure(lookups[language])
            beside: Beside = {
                name: found,
                "English": english,
                **_interval(figure, lookups[language], lookups["en"], resamples),
            }
            rows.append(
                Row(
                    what=f"{name} against English: {what}{shown}",
                    unit=RATIO,
                    rounds=(found / english,),
                    target=None if shown or what == _AREA else Target("least", _LEAST),
                    beside=(beside,),
                )
            )
    for language, name in _LANGUAGES.items():
        rows += _policy_rows(f"{name}: {{}}{shown}", lookups[language], pairs[language], vectors)
    return rows


def _lookups(pairs: Sequence[_Pair], vectors: _ByText) -> _Lookups:
    cached = np.stack([vectors[pair.cached] for pair in pairs])
    asked = np.stack([vectors[pair.asked] for pair in pairs])
    similarities = asked @ cached.T
    # Both data sets have intents of banks: one's question may be right for the other's, whatever their names.
    other = np.array([[_is_other(one.intent, another.intent) for another in pairs] for one in pairs])
    nearest = np.where(other, similarities, -1.0).argmax(axis=1)
    places = np.arange(len(pairs))
    return _Lookups(
        similarities[places, places],
        similarities[places, nearest],
        np.array([not _is_vetoed(pair.cached, pair.asked) for pair in pairs]),
        np.array([not _is_vetoed(pairs[place].cached, pair.asked) for pair, place in zip(pairs, nearest, strict=True)]),
    )


def _is_other(one: str, another: str) -> bool:
    return one != another and one.split("/")[0] == another.split("/")[0]


def _is_vetoed(cached: str, asked: str) -> bool:
    return bool(compare(Text.of(asked), [Text.of(cached)]).veto)


def _nearest(lookups: _Lookups) -> float:
    return float(np.mean(lookups.right > lookups.wrong))


def _recall(lookups: _Lookups) -> float:
    """At the lowest threshold that at most `_WRONG` of the wrong ones are above."""
    threshold = np.sort(lookups.wrong)[::-1][int(_WRONG * len(lookups.wrong))]
    return float(np.mean(lookups.right > threshold))


def _recall_with_vetoes(lookups: _Lookups) -> float:
    right, wrong = (
        np.where(passes, similarities, -1.0)
        for similarities, passes in ((lookups.right, lookups.right_passes), (lookups.wrong, lookups.wrong_passes))
    )
    return _recall(lookups._replace(right=right, wrong=wrong))


def _area(right: _Floats, wrong: _Floats) -> float:
    """Under the ROC curve: how often a right one is above a wrong one."""
    return float(np.mean(right[:, None] > wrong) + np.mean(right[:, None] == wrong) / 2)


_FIGURES: dict[str, Callable[[_Lookups], float]] = {
    "own answer is nearest": _nearest,
    f"recall at {_WRONG:.0%} wrong": _recall,
    f"recall at {_WRONG:.0%} wrong, with vetoes": _recall_with_vetoes,
    _AREA: lambda lookups: _area(lookups.right, lookups.wrong),
}


def _interval(figure: Callable[[_Lookups], float], ours: _Lookups, english: _Lookups, resamples: int) -> Beside:
    dice, count = np.random.default_rng(7), len(ours.right)
    ratios = []
    for _ in range(resamples):
        places = dice.integers(0, count, count)
        ratios.append(figure(ours.at(places)) / max(figure(english.at(places)), 1 / count))
    low, high = np.percentile(ratios, _INTERVAL)
    return {"95 % from": float(low), "to": float(high)}


def _policy_rows(what: str, lookups: _Lookups, pairs: Sequence[_Pair], vectors: _ByText) -> list[Row]:
    same = np.repeat([True, False], len(lookups.right))
    passes = np.concatenate([lookups.right_passes, lookups.wrong_passes])
    rows = _served(what.format("policy"), np.concatenate([lookups.right, lookups.wrong]), same, passes)
    same = np.array([pair.same for pair in pairs])
    similarities = np.array([vectors[pair.asked] @ vectors[pair.cached] for pair in pairs], dtype=np.float32)
    passes = np.array([not _is_vetoed(pair.cached, pair.asked) for pair in pairs])
    rows += _served(what.format("policy on near neighbours"), similarities, same, passes)
    area = _area(similarities[same], similarities[~same])
    return [*rows, Row(what=what.format("near neighbours, area under the ROC curve"), unit="share", rounds=(area,))]


def _served(what: str, similarities: _Floats, same: Flags, passes: Flags) -> list[Row]:
    # By similarity alone: what words show of a pair is measured in English.
    evidence = [evidence_of([("", each)]).features for each in similarities.tolist()]
    figures = figures_of(served_by_policy(evidence, same, passes, _DELTA), same)
    beside: Beside = {
        "wrong share of hits": figures["wrong_share_of_hits"],
        "wrong ones served": figures["negatives_served"] or 0.0,
    }
    return [Row(what=f"{what}, recall", unit="share", rounds=(figures["recall"] or 0.0,), beside=(beside,))]
