"""The report of an evaluation, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.evaluation.perplexity import Evaluation


@dataclass(frozen=True, slots=True)
class Report:
    """A model, a text and the figures."""

    model: str
    text: str
    scheme: str
    """Value of ``--quantization``."""
    runner: str
    reference: str | None
    reference_runner: str | None
    window: int
    stride: int
    evaluation: Evaluation
    schemes: Mapping[str, int]
    """Number of matrices by scheme; empty: all are floats."""
    bits_per_weight: float
    weight_bytes: int
    """Bytes of the layers' matrices and the head."""


def as_json(report: Report) -> dict[str, Any]:
    """The figures by name; those of a comparison are null without a reference."""
    evaluation, loss = report.evaluation, report.evaluation.loss
    return {
        "model": report.model,
        "text": report.text,
        "scheme": report.scheme,
        "runner": report.runner,
        "reference": report.reference,
        "reference_runner": report.reference_runner,
        "tokens": evaluation.tokens,
        "window": report.window,
        "stride": report.stride,
        "perplexity": evaluation.perplexity,
        "reference_perplexity": None if loss is None else loss.reference_perplexity,
        "kl_mean": None if loss is None else loss.kl_mean,
        "kl_p99": None if loss is None else loss.kl_p99,
        "top1_agreement": None if loss is None else loss.top1_agreement,
        "schemes": dict(report.schemes),
        "bits_per_weight": report.bits_per_weight,
        "weight_bytes": report.weight_bytes,
        "seconds": evaluation.seconds,
    }


def as_text(report: Report) -> str:
    """A short table."""
    evaluation = report.evaluation
    rows = [
        ("weights", ", ".join(f"{count} in {name}" for name, count in report.schemes.items()) or "all in floats"),
        ("", f"{report.bits_per_weight:.2f} bits each, {report.weight_bytes / 1e6:,.1f} MB"),
        ("runner", report.runner),
        ("perplexity", f"{evaluation.perplexity:.4f}"),
        *_comparison(report),
        ("seconds", f"{evaluation.seconds:.1f}"),
    ]
    lines = [
        f"{report.model} on {report.text}: {evaluation.tokens:,} tokens in windows of {report.window}, "
        f"stride {report.stride}",
        "",
        *(f"{name:<18}{value}" for name, value in rows),
    ]
    return "\n".join(lines)


def _comparison(report: Report) -> list[tuple[str, str]]:
    loss = report.evaluation.loss
    if loss is None:
        return [("compared with", "nothing: the weights are as they are in the files")]
    rise = report.evaluation.perplexity / loss.reference_perplexity - 1
    return [
        ("compared with", f"{report.reference}, {report.reference_runner}"),
        ("  perplexity", f"{loss.reference_perplexity:.4f}, so {rise:+.3%}"),
        ("  KL", f"{loss.kl_mean:.5f} nats per token, p99 {loss.kl_p99:.5f}"),
        ("  top-1 agreement", f"{loss.top1_agreement:.2%}"),
    ]
