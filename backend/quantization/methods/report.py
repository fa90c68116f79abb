"""The report of a quantisation: schemes and losses by matrix."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from backend.quantization.methods.sensitivity import Sensitivity


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """One linear layer. Errors are norms of the difference, relative to the norm of the exact values."""

    name: str
    scheme: str
    weights: int
    nbytes: int
    """Scales included."""
    weight_error: float
    output_error: float | None
    """On the calibration data, with inputs from the quantised layers before it; None: no calibration."""
    damping: float | None = None
    """Of GPTQ's Hessian; None: none was inverted."""
    notes: tuple[str, ...] = ()
    """Deviations, in words."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One decoder layer."""

    layer: int
    seconds: float
    drift: float | None
    """Relative distance of its output from that of the unquantised model; None: no calibration."""
    matrices: tuple[MatrixReport, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of the quantised from the original model, on some of the calibration windows."""

    tokens: int
    kl: float
    """KL(unquantised ‖ quantised), nats a token."""
    top1: float
    """Share of tokens with the same top-1 prediction."""


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """A whole model."""

    provenance: dict[str, Any]
    """Model, method and options."""
    layers: tuple[LayerReport, ...]
    divergence: Divergence | None
    sensitivities: tuple[Sensitivity, ...] = ()
    """Of mixed precision."""

    @property
    def bits_per_weight(self) -> float:
        """Of the layers' matrices, scales included."""
        matrices = [matrix for layer in self.layers for matrix in layer.matrices]
        return 8 * sum(matrix.nbytes for matrix in matrices) / sum(matrix.weights for matrix in matrices)

    def as_json(self) -> dict[str, Any]:
        """As written beside the weights."""
        return {**dataclasses.asdict(self), "bits_per_weight": round(self.bits_per_weight, 4)}

    def as_table(self) -> str:
        """A line for each layer, then the notes, then the totals."""
        lines = ["layer  seconds  weight error  output error   drift  schemes"]
        for layer in self.layers:
            outputs = [matrix.output_error for matrix in layer.matrices if matrix.output_error is not None]
            schemes = sorted({matrix.scheme for matrix in layer.matrices})
            lines.append(
                f"{layer.layer:5}  {layer.seconds:7.1f}  {_mean([m.weight_error for m in layer.matrices]):>12}  "
                f"{_mean(outputs):>12}  {_mean([] if layer.drift is None else [layer.drift]):>6}  {', '.join(schemes)}"
            )
        for layer in self.layers:
            lines += [f"{matrix.name}: {note}" for matrix in layer.matrices for note in matrix.notes]
        lines.append(f"{self.bits_per_weight:.3f} bits a weight in the layers, scales included")
        if (d := self.divergence) is not None:
            lines.append(
                f"on {d.tokens} calibration tokens: KL to the unquantised model {d.kl:.4f} nats a token, "
                f"the same most likely token for {d.top1:.1%}"
            )
        return "\n".join(lines)


def _mean(errors: list[float]) -> str:
    return f"{sum(errors) / len(errors):.4f}" if errors else "-"
