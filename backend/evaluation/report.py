"""The report on a model and a text, for programs and for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backend.evaluation.evaluation import Evaluation
from backend.evaluation.weight_size import WeightSize


@dataclass(frozen=True, slots=True)
class Report:
    """What was evaluated, and what came of it."""

    model: str
    text: str
    scheme: str
    runner: str
    """By name, as all of these."""
    reference: str | None
    reference_runner: str | None
    window: int
    stride: int
    evaluation: Evaluation
    size: WeightSize


def as_json(report: Report) -> dict[str, Any]:
    """The figures by name; those of a comparison are null where there was nothing to compare with."""
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
        "bits_per_weight": report.size.bits_per_weight,
        "weight_bytes": report.size.nbytes,
        "seconds": evaluation.seconds,
    }


def as_text(report: Report) -> str:
    """A short table."""
    evaluation, size = report.evaluation, report.size
    rows = [
        ("weights", f"{report.scheme}, {size.bits_per_weight:.2f} bits, {size.nbytes / 1e6:,.1f} MB in linear layers"),
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
