"""Measures the loss of each group of matrices by bits, with everything else unquantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from backend.quantization.calibration.decoder_layer import DecoderLayer, Group
from backend.quantization.calibration.divergence import Predictions
from backend.quantization.calibration.input_statistics import InputStatistics, output_loss
from backend.quantization.calibration.stages import stages
from backend.quantization.methods.fitting import Schemes
from backend.quantization.methods.rounding import Rounding
from backend.quantized_weights.quantized_linear import QuantizedLinear


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One group of one layer, at one number of bits."""

    layer: int
    group: Group
    bits: int
    size: int
    """In bits, scales included."""
    output_error: float
    """Relative, of the group's outputs on the calibration data."""
    kl: float
    """KL(unquantised ‖ with this group quantised) of the predictions, nats per token. Measured at the fewest bits and
    scaled by the squared error of the outputs: the KL of small errors is proportional to it."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Measures all groups in a single pass over the layers.

    Each layer adds one copy of the probe windows for each of its groups, computed with that group in the fewest
    bits; the copies of earlier layers run through the unquantised layer. So a layer is loaded once, and each final
    copy gives the effect of one group on the predictions.

    Args:
        rounding: of the recipe.
        forms: the schemes to try, by bits, fewest first. The last one is without loss.
        predictions: the end of the model.
        layers: loads a layer.
        num_layers: of the model.
    """

    rounding: Rounding
    forms: dict[int, Schemes]
    predictions: Predictions
    layers: Callable[[int], DecoderLayer]
    num_layers: int

    def measure(self, hidden: torch.Tensor, probed: int, progress: Callable[[str], None]) -> list[Sensitivity]:
        """Runs calibration windows through the unquantised model.

        Args:
            hidden: float32 [windows, T, hidden], input of the first layer; it is overwritten.
            probed: number of first windows that measure predictions.
        """
        copies: list[torch.Tensor] = []
        groups: list[_Measured] = []
        for index in range(self.num_layers):
            layer = self.layers(index)
            before = hidden[:probed].clone()
            measured = [self._group(layer, group, seen) for group, seen in stages(layer, hidden)]
            for copy in copies:
                copy.copy_(self._through(layer, copy))
            for of_group in measured:
                with _replaced(layer, of_group.fewest):
                    copies.append(self._through(layer, before))
            groups += measured
            progress(f"sensitivity of layer {index + 1} of {self.num_layers}")
        progress("sensitivity: comparing predictions")
        kls = [max(kl, 0.0) for kl, _ in self.predictions.divergences(hidden[:probed], copies)]
        return [part for kl, of_group in zip(kls, groups, strict=True) for part in of_group.sensitivities(kl)]

    @staticmethod
    def _through(layer: DecoderLayer, windows: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(window) for window in torch.split(windows, 1)])

    def _group(self, layer: DecoderLayer, group: Group, seen: dict[tuple[str, ...], InputStatistics]) -> _Measured:
        forms: list[_Form] = []
        fewest: dict[str, QuantizedLinear] = {}
        for bits, schemes in self.forms.items():
            size, lost, whole = 0, 0.0, 0.0
            for names, statistics in seen.items():
                weights = [layer.linears[name].weight for name in names]
                scheme, _ = schemes(layer.index, group, sum(map(len, weights)), weights[0].shape[1])
                rounded = self.rounding(weights, statistics, scheme)
                hessian = statistics.hessian * statistics.rows
                for name, weight, part in zip(names, weights, rounded, strict=True):
                    if not forms:
                        fewest[name] = part.linear
                    size += 8 * part.linear.nbytes
                    lost += max(float(output_loss(weight - part.linear.unpack(), hessian).sum()), 0.0)
                    whole += float(output_loss(weight, hessian).sum())
            forms.append(_Form(bits, size, lost, whole))
        return _Measured(layer.index, group, forms, fewest)


@dataclass(frozen=True, slots=True)
class _Form:
    bits: int
    size: int
    lost: float
    whole: float


@dataclass(frozen=True, slots=True)
class _Measured:
    layer: int
    group: Group
    forms: list[_Form]
    fewest: dict[str, QuantizedLinear]

    def sensitivities(self, kl: float) -> Iterator[Sensitivity]:
        """Of all forms, from the KL of the first."""
        most = self.forms[0].lost
        for form in self.forms:
            yield Sensitivity(
                layer=self.layer,
                group=self.group,
                bits=form.bits,
                size=form.size,
                output_error=(form.lost / form.whole) ** 0.5 if form.whole > 0 else 0.0,
                kl=kl * form.lost / most if most > 0 else 0.0,
            )


@contextmanager
def _replaced(layer: DecoderLayer, linears: dict[str, QuantizedLinear]) -> Iterator[None]:
    """Quantises some matrices of a layer temporarily."""
    before = {name: layer.linears[name].weight for name in linears}
    for name, linear in linears.items():
        layer.linears[name].weight = linear.unpack()
    try:
        yield
    finally:
        for name, weight in before.items():
            layer.linears[name].weight = weight
