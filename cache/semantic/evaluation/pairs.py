"""The report on labelled pairs: what a similarity and the vetoes say of each, and what would be served."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.semantic.embedding.encoder import Encoder, vectors_of
from cache.semantic.evaluation.rows import LabelledPair
from cache.semantic.policy.budget import DEVIATIONS, WARM_LABELS
from cache.semantic.policy.ledger import max_risk
from cache.semantic.policy.policy import FeatureVector, JudgeError
from cache.semantic.policy.posterior import Posterior, evidence_of
from cache.semantic.wording.comparison import TextComparison, compare
from cache.semantic.wording.text import Text

THRESHOLDS = (0.70, 0.75, 0.80, 0.85, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98)
FOLDS = 5
MAX_LABELS = 20_000
"""Labels that a fold's posterior learns from at most: it has few weights, and more labels move them no more."""

_SEED = 20260
Flags = npt.NDArray[np.bool_]
Report = dict[str, Any]
Progress = Callable[[str], None]
"""It is told now and then how far a report is."""


def report_on_pairs(pairs: Sequence[LabelledPair], encoder: Encoder, progress: Progress, delta: float) -> Report:
    """All figures of `pairs` as JSON values: of the policy with budget `delta` and of static THRESHOLDS."""
    similarities = _similarities(pairs, encoder, progress)
    wordings = [compare(Text.of(pair.asked), [Text.of(pair.cached)]) for pair in pairs]
    evidence = [features_of(*each) for each in zip(similarities.tolist(), wordings, strict=True)]
    same = np.array([pair.same for pair in pairs], dtype=np.bool_)
    passed = np.array([not wording.veto for wording in wordings], dtype=np.bool_)
    allowed = {"vetoes_on": passed, "vetoes_off": np.ones_like(passed)}
    vetoed = Counter((wording.veto, pair.same) for wording, pair in zip(wordings, pairs, strict=True))
    vetoes = Counter(wording.veto for wording in wordings if wording.veto).most_common()
    return {
        "pairs": len(pairs),
        "positives": int(same.sum()),
        "negatives": int((~same).sum()),
        "model": encoder.name,
        "delta": delta,
        "policy": {name: figures_of(served_by_policy(evidence, same, of, delta), same) for name, of in allowed.items()},
        "static": {
            f"{least:.2f}": {name: figures_of(of & (similarities >= least), same) for name, of in allowed.items()}
            for least in THRESHOLDS
        },
        "vetoes": {name: {"positives": vetoed[name, True], "negatives": vetoed[name, False]} for name, _ in vetoes},
        "notes": _notes(same, int(passed.sum())),
    }


def _similarities(pairs: Sequence[LabelledPair], encoder: Encoder, progress: Progress) -> npt.NDArray[np.float32]:
    """Cosines, float32 [pairs]; 0 where a text is empty, since nothing is ever served for such a one."""
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.cached, pair.asked)))
    vectors = vectors_of(texts, encoder, progress)
    vectors[[not text.strip() for text in texts]] = 0.0
    by_text = dict(zip(texts, vectors, strict=True))
    return np.array([by_text[pair.cached] @ by_text[pair.asked] for pair in pairs])


def figures_of(served: Flags, same: Flags) -> dict[str, Any]:
    """The figures of serving the pairs `served`, bool [pairs], of which `same` are right to serve, bool [pairs].

    `recall` is the share of the positive pairs that are served, `negatives_served` that of the negative ones, and
    `wrong_share_of_hits` the share of negative pairs among those served, 0 where none is. `wrong_per_request` is their
    share of all pairs: what a budget of wrong answers limits. A share is None where it has no whole.
    """
    hits, wrong, positives, pairs = int(served.sum()), int((served & ~same).sum()), int(same.sum()), len(same)
    return {
        "recall": (hits - wrong) / positives if positives else None,
        "wrong_share_of_hits": wrong / hits if hits else 0.0,
        "negatives_served": wrong / (pairs - positives) if pairs > positives else None,
        "wrong_per_request": wrong / pairs,
        "hits": hits,
        "wrong_hits": wrong,
    }


def served_by_policy(evidence: Sequence[FeatureVector], same: Flags, allowed: Flags, delta: float) -> Flags:
    """Which pairs the budget policy serves when each is judged by what was learned from the others; bool [pairs].

    A file has no traffic, so this is not the policy as it lives: there each audit and each miss near a neighbour
    teaches it, and it weighs the votes of sixteen neighbours. Here the pairs are divided at random, always the same
    way, into FOLDS parts. For each part, a posterior of correctness learns from the labels of the other parts, every
    pair a neighbourhood of one; the limit of risk is the highest at which, of the other parts' pairs, neither the
    expected nor the actual wrong answers are more than `delta` of all requests, and what is below it is served. Only
    pairs that the vetoes allow (`allowed`, bool [pairs]) are learned from and served; all are requests. With fewer
    labels than the live policy needs, WARM_LABELS, nothing is served.

    Args:
        evidence: see `features_of`, float64 [FEATURES] for each pair.
        same: whether a pair is right to serve, bool [pairs].
        delta: share of all requests that may be answered wrongly.
    """
    served = np.zeros(len(same), dtype=np.bool_)
    order = list(range(len(same)))
    random.Random(_SEED).shuffle(order)  # noqa: S311  # a division of data, nothing secret
    for fold in range(FOLDS):
        asked = order[fold::FOLDS]
        known = [place for part in range(FOLDS) if part != fold for place in order[part::FOLDS]]
        taught = [place for place in known if allowed[place]]
        if len(taught) < WARM_LABELS:
            continue
        posterior = Posterior()
        for place in taught[:MAX_LABELS]:
            posterior.learn(evidence[place], bool(same[place]), JudgeError(1.0, 0.0))
        risks = np.array([posterior.wrong(features, DEVIATIONS) for features in evidence])
        limit = _limit(risks[taught], same[taught], delta * len(known), max_risk(delta))
        served[asked] = allowed[asked] & (risks[asked] <= limit)
    return served


def features_of(similarity: float, wording: TextComparison) -> FeatureVector:
    """Of a pair as a question with one neighbour; nothing is known of the words of one with a veto."""
    evidence = evidence_of([("", similarity)])
    return (evidence if wording.veto else evidence.with_texts(wording.features)).features


def _limit(risks: npt.NDArray[np.float64], same: Flags, budget: float, most: float) -> float:
    """The highest risk, `most` at most, up to which at most `budget` answers are wrong, expected or in fact.

    Pairs of one risk, such as those of one similarity, are served all or none. -1 where none can be served.
    """
    order = np.argsort(risks, kind="stable")
    rising = risks[order]
    wrong = np.maximum(np.cumsum(rising), np.cumsum(~same[order]))
    too_high = rising[(wrong > budget) | (rising > most)].min(initial=np.inf)
    return float(rising[rising < too_high].max(initial=-1.0))


def _notes(same: Flags, passed: int) -> list[str]:
    notes = []
    if same.all() or not same.any():
        notes.append(f"All pairs are {'positive' if same.all() else 'negative'}: the other class has no figures.")
    if passed * (FOLDS - 1) // FOLDS < WARM_LABELS:
        notes.append(
            f"Vetoes let {passed} pairs pass. The policy serves nothing before it has learned from {WARM_LABELS},"
            f" and it learns from {FOLDS - 1} of {FOLDS} parts of them."
        )
    return notes


def format_pairs_report(report: Report) -> str:
    """The report for a person at a terminal."""
    rows = [("policy", report["policy"]), *((f">= {name}", row) for name, row in report["static"].items())]
    widths = {"recall": 8, "wrong_share_of_hits": 12, "negatives_served": 12}
    vetoes = (f"{name} {count['positives']}, {count['negatives']}" for name, count in report["vetoes"].items())
    return "\n".join(
        [
            f"{report['pairs']} pairs, {report['positives']} positive and {report['negatives']} negative, embedded with"
            f" {report['model']}",
            "",
            "              vetoes on                      vetoes off",
            "serve         recall  wrong/hits  neg.served  recall  wrong/hits  neg.served",
            *(f"{name:<12}{cells(row['vetoes_on'], widths)}{cells(row['vetoes_off'], widths)}" for name, row in rows),
            "",
            "recall      share of the positive pairs (label 1) that are answered from the cache",
            "wrong/hits  share of what is answered from the cache that is negative (label 0): a wrong answer",
            "neg.served  share of the negative pairs that are answered from the cache",
            f"policy      the default policy with a budget of {report['delta']:g} wrong answers per request, judged on",
            "            pairs it has not learned from; the other rows serve whatever is at least so similar",
            "",
            f"vetoed (positive, negative pairs): {'; '.join(vetoes) or 'none'}",
            *report["notes"],
        ]
    )


def cells(figures: Mapping[str, float | None], widths: Mapping[str, int]) -> str:
    """The shares that `widths` names, in columns of these widths; "-" for one without a whole."""
    shares = {name: "-" if figures[name] is None else f"{figures[name]:.4f}" for name in widths}
    return "".join(f"{shares[name]:>{width}}" for name, width in widths.items())
