"""Quantises a decoder layer by layer, each on the output of the quantised layers before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from backend.quantization.calibration.decoder_layer import GROUPS, DecoderLayer, Group
from backend.quantization.calibration.input_statistics import InputStatistics, relative_output_error
from backend.quantization.calibration.stages import InputStatisticsByGroup, stages
from backend.quantization.methods.fitting import Schemes
from backend.quantization.methods.report import LayerReport, MatrixReport
from backend.quantization.methods.rounding import Rounded, Rounding
from backend.quantized_weights.quantized_linear import CannotQuantize, QuantizedLinear

LayerRewrite = Callable[[DecoderLayer, InputStatisticsByGroup], dict[str, torch.Tensor]]
"""Rescales a layer by its groups' input statistics, so that it computes the same; see `ActivationScaling`."""


@dataclass(slots=True)
class Windows:
    """Calibration inputs of a layer: float32 [windows, T, hidden]."""

    hidden: torch.Tensor
    """Output of the quantised layers before it."""
    reference: torch.Tensor
    """The first few, of the unquantised layers."""

    @property
    def drift(self) -> float:
        """Distance of the two, relative to the second."""
        apart = self.hidden[: len(self.reference)] - self.reference
        return float(apart.norm() / self.reference.norm())


@dataclass(slots=True)
class QuantizedLayer:
    """A quantised layer."""

    report: LayerReport
    linears: dict[str, QuantizedLinear]
    """By names within the layer."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Other changed tensors, by names within the layer, in the file's dtype."""


@dataclass(frozen=True, slots=True)
class LayerQuantizer:
    """Quantises one layer at a time.

    Args:
        rounding: chooses the codes.
        schemes: gives the scheme of each matrix.
        fold: applied to each layer first; None: none.
    """

    rounding: Rounding
    schemes: Schemes
    fold: LayerRewrite | None = None

    def calibrated(self, layer: DecoderLayer, windows: Windows) -> QuantizedLayer:
        """Quantises a layer and runs the windows through it.

        Raises:
            CannotQuantize: a weight cannot be kept in its scheme; names it.
        """
        started, linears, reports = time.monotonic(), {}, []
        for batch in torch.split(windows.reference, 1):
            batch.copy_(layer(batch))
        tensors: dict[str, torch.Tensor] = {}
        if self.fold is not None:
            whole_layer_statistics: InputStatisticsByGroup = {}
            for _, of_group in stages(layer, windows.hidden.clone()):
                whole_layer_statistics |= of_group
            tensors = self.fold(layer, whole_layer_statistics)
        for group, seen in stages(layer, windows.hidden):
            for names, statistics in seen.items():
                for name, rounded, report in self._rounded(layer, group, names, statistics):
                    layer.linears[name].weight = rounded.linear.unpack()
                    linears[name] = rounded.linear
                    reports.append(report)
        seconds = time.monotonic() - started
        return QuantizedLayer(LayerReport(layer.index, seconds, windows.drift, tuple(reports)), linears, tensors)

    def uncalibrated(self, layer: DecoderLayer) -> QuantizedLayer:
        """Quantises a layer with a rounding that uses only the weights. Raises as `calibrated`."""
        started, linears, reports = time.monotonic(), {}, []
        for group in GROUPS:
            for names in layer.group(group):
                for name, rounded, report in self._rounded(layer, group, names, None):
                    linears[name] = rounded.linear
                    reports.append(report)
        return QuantizedLayer(LayerReport(layer.index, time.monotonic() - started, None, tuple(reports)), linears)

    def _rounded(
        self, layer: DecoderLayer, group: Group, names: tuple[str, ...], seen: InputStatistics | None
    ) -> list[tuple[str, Rounded, MatrixReport]]:
        weights = [layer.linears[name].weight for name in names]
        size = weights[0].shape[1]
        scheme, note = self.schemes(layer.index, group, sum(map(len, weights)), size)
        try:
            rounded = self.rounding(weights, seen or InputStatistics(0), scheme)
        except CannotQuantize as error:
            raise CannotQuantize(f"model.layers.{layer.index}.{names[0]}: {error}") from error
        hessian = None if seen is None else seen.hessian
        reports = [
            _report(f"model.layers.{layer.index}.{name}", weight, part, hessian, note)
            for name, weight, part in zip(names, weights, rounded, strict=True)
        ]
        return list(zip(names, rounded, reports, strict=True))


def _report(
    name: str, weight: torch.Tensor, rounded: Rounded, hessian: torch.Tensor | None, note: str | None
) -> MatrixReport:
    kept = rounded.linear.unpack()
    return MatrixReport(
        name=name,
        scheme=rounded.linear.scheme.name,
        weights=weight.numel(),
        nbytes=rounded.linear.nbytes,
        weight_error=float((kept - weight).norm() / weight.norm().clamp(min=1e-30)),
        output_error=None if hessian is None else relative_output_error(weight, kept, hessian),
        damping=rounded.damping,
        notes=(*((note,) if note else ()), *rounded.notes),
    )
