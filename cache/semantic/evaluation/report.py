"""The report on a file of pairs, for programs and for people."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from cache.semantic.evaluation.cross_validation import FOLDS, served_by_policy
from cache.semantic.evaluation.figures import Flags, figures_of
from cache.semantic.evaluation.pairs import LabelledPair
from cache.semantic.evaluation.verdicts import Verdicts
from cache.semantic.policy.budget import WARM_LABELS

THRESHOLDS = (0.70, 0.75, 0.80, 0.85, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98)

Report = dict[str, Any]


def report_on(file: str, pairs: Sequence[LabelledPair], verdicts: Verdicts, model: str, delta: float) -> Report:
    """All figures of `pairs` as JSON values: of the policy with budget `delta` and of static THRESHOLDS."""
    same = np.array([pair.same for pair in pairs], dtype=np.bool_)
    passed = np.array([name is None for name in verdicts.refusals], dtype=np.bool_)
    guards = {"guards_on": passed, "guards_off": np.ones(len(pairs), dtype=np.bool_)}
    similarities = verdicts.similarities
    return {
        "file": file,
        "pairs": len(pairs),
        "positives": int(same.sum()),
        "negatives": int((~same).sum()),
        "model": model,
        "delta": delta,
        "policy": {
            name: figures_of(served_by_policy(similarities, same, allowed, delta), same)._asdict()
            for name, allowed in guards.items()
        },
        "static": {
            f"{threshold:.2f}": {
                name: figures_of(allowed & (similarities >= threshold), same)._asdict()
                for name, allowed in guards.items()
            }
            for threshold in THRESHOLDS
        },
        "refusals": _refusals(verdicts.refusals, same),
        "time": {
            "embedding_seconds": round(verdicts.embedding_seconds, 3),
            "embedding_ms_per_text": round(1e3 * verdicts.embedding_seconds / (2 * len(pairs)), 3),
            "guards_seconds": round(float(verdicts.guard_seconds.sum()), 3),
            "guards_us_per_pair_median": round(1e6 * float(np.median(verdicts.guard_seconds)), 1),
        },
        "notes": _notes(same, int(passed.sum())),
    }


def _refusals(refusals: Sequence[str | None], same: Flags) -> dict[str, dict[str, int]]:
    """By guard: how many pairs of either label it was the first to refuse, the busiest guard first."""
    counts = Counter(name for name in refusals if name is not None)
    positive = Counter(name for name, is_same in zip(refusals, same.tolist(), strict=True) if name and is_same)
    return {
        name: {"positives": positive[name], "negatives": count - positive[name]} for name, count in counts.most_common()
    }


def _notes(same: Flags, passed: int) -> list[str]:
    notes = []
    if same.all() or not same.any():
        notes.append(f"All pairs are {'positive' if same.all() else 'negative'}: the other class has no figures.")
    if passed * (FOLDS - 1) // FOLDS < WARM_LABELS:
        notes.append(
            f"Guards let {passed} pairs pass. The policy serves nothing before it has learned from {WARM_LABELS},"
            f" and it learns from {FOLDS - 1} of {FOLDS} parts of them."
        )
    return notes


def format_report(report: Report) -> str:
    """The report for a person at a terminal."""
    rows = [("policy", report["policy"]), *((f">= {name}", row) for name, row in report["static"].items())]
    time = report["time"]
    lines = [
        f"{report['file']}: {report['pairs']} pairs, {report['positives']} positive and {report['negatives']} negative,"
        f" embedded with {report['model']}",
        "",
        "              guards on                      guards off",
        "serve         recall  wrong/hits  neg.served  recall  wrong/hits  neg.served",
        *(f"{name:<12}{_cells(row['guards_on'])}{_cells(row['guards_off'])}" for name, row in rows),
        "",
        "recall      share of the positive pairs (label 1) that are answered from the cache",
        "wrong/hits  share of what is answered from the cache that is negative (label 0): a wrong answer",
        "neg.served  share of the negative pairs that are answered from the cache",
        "policy      the default policy with a budget of"
        f" {report['delta']:g} wrong answers per request, judged on pairs it has not learned from;",
        "            the other rows serve whatever is at least so similar",
        "",
        "refused by guards (positive, negative pairs): "
        + (", ".join(f"{n} {c['positives']}, {c['negatives']}" for n, c in report["refusals"].items()) or "none"),
        f"time: {time['embedding_ms_per_text']:.2f} ms to embed a text,"
        f" {time['guards_us_per_pair_median']:.0f} us to read and compare a pair (median)",
        *report["notes"],
    ]
    return "\n".join(lines)


def _cells(figures: dict[str, Any]) -> str:
    shares = (figures["recall"], figures["wrong_share_of_hits"], figures["negatives_served"])
    recall, wrong, negatives = ("-" if share is None else f"{share:.4f}" for share in shares)
    return f"{recall:>8}{wrong:>12}{negatives:>12}"
