"""The report on labelled pairs: what a similarity and the vetoes say of each, and what would be served."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.evaluation.cross_validation import FOLDS, Flags, features_of, figures_of, served_by_policy
from cache.semantic.evaluation.rows import LabelledPair
from cache.semantic.evaluation.vectors import vectors_of
from cache.semantic.policy.budget import WARM_LABELS
from cache.semantic.wording.comparison import compare
from cache.semantic.wording.text import Text

THRESHOLDS = (0.70, 0.75, 0.80, 0.85, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98)

Report = dict[str, Any]


def report_on_pairs(
    file: str, pairs: Sequence[LabelledPair], encoder: Encoder, progress: Callable[[str], None], delta: float
) -> Report:
    """All figures of `pairs` as JSON values: of the policy with budget `delta` and of static THRESHOLDS.

    `progress` is told now and then how far it is.
    """
    similarities = _similarities(pairs, encoder, progress)
    wordings = [compare(Text.of(pair.asked), [Text.of(pair.cached)]) for pair in pairs]
    evidence = [features_of(*each) for each in zip(similarities.tolist(), wordings, strict=True)]
    same = np.array([pair.same for pair in pairs], dtype=np.bool_)
    passed = np.array([not wording.veto for wording in wordings], dtype=np.bool_)

    def figures(served: Callable[[Flags], Flags]) -> dict[str, Any]:
        """Of what is `served` of the pairs that vetoes allow, and of all."""
        vetoes = {"vetoes_on": passed, "vetoes_off": np.ones_like(passed)}
        return {name: figures_of(served(allowed), same)._asdict() for name, allowed in vetoes.items()}

    def above(least: float) -> Callable[[Flags], Flags]:
        return lambda allowed: allowed & (similarities >= least)

    refused = [
        Counter(w.veto for w, each in zip(wordings, same, strict=True) if w.veto and each == of) for of in (1, 0)
    ]
    return {
        "file": file,
        "pairs": len(pairs),
        "positives": int(same.sum()),
        "negatives": int((~same).sum()),
        "model": encoder.name,
        "delta": delta,
        "policy": figures(lambda allowed: served_by_policy(evidence, same, allowed, delta)),
        "static": {f"{least:.2f}": figures(above(least)) for least in THRESHOLDS},
        "vetoes": {
            name: {"positives": refused[0][name], "negatives": refused[1][name]}
            for name, _ in (refused[0] + refused[1]).most_common()
        },
        "notes": _notes(same, int(passed.sum())),
    }


def _similarities(
    pairs: Sequence[LabelledPair], encoder: Encoder, progress: Callable[[str], None]
) -> npt.NDArray[np.float32]:
    """Cosines, float32 [pairs]; 0 where a text has no vector, since nothing is ever served for such a one."""
    row = {text: place for place, text in enumerate(dict.fromkeys(t for p in pairs for t in (p.cached, p.asked)))}
    vectors = vectors_of(list(row), encoder, lambda done: progress(f"{done} of {len(row)} texts embedded"))
    cached, asked = ([row[text] for text in texts] for texts in zip(*((p.cached, p.asked) for p in pairs), strict=True))
    cosines: npt.NDArray[np.float32] = np.einsum("ij,ij->i", vectors[cached], vectors[asked])
    empty = np.array([not (pair.cached.strip() and pair.asked.strip()) for pair in pairs])
    return np.where(empty | np.isnan(cosines), np.float32(0.0), cosines)


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
    vetoes = (f"{name} {count['positives']}, {count['negatives']}" for name, count in report["vetoes"].items())
    return "\n".join(
        [
            f"{report['file']}: {report['pairs']} pairs, {report['positives']} positive and {report['negatives']}"
            f" negative, embedded with {report['model']}",
            "",
            "              vetoes on                      vetoes off",
            "serve         recall  wrong/hits  neg.served  recall  wrong/hits  neg.served",
            *(f"{name:<12}{_cells(row['vetoes_on'])}{_cells(row['vetoes_off'])}" for name, row in rows),
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


def _cells(figures: dict[str, Any]) -> str:
    shares = (figures["recall"], figures["wrong_share_of_hits"], figures["negatives_served"])
    recall, wrong, negatives = ("-" if share is None else f"{share:.4f}" for share in shares)
    return f"{recall:>8}{wrong:>12}{negatives:>12}"
