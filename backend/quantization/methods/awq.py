"""AWQ (arXiv 2306.00978): scales weights by the magnitude of their inputs, inputs by the inverse.

``(W · diag(s)) · (diag(s)⁻¹ · x)`` is ``W · x``; rounding ``W · diag(s)`` instead of ``W`` moves error from inputs with
a large ``s`` to those with a small one. ``s = mean|x| ** alpha``, alpha searched. ``diag(s)⁻¹`` is folded into the
producer of x: a norm's weight, the rows of the value projection, the rows of ``up``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backend.models.config import ModelConfig
from backend.quantization.calibration.decoder_layer import DecoderLayer, DenseLinear, ExpertNames, O, V
from backend.quantization.calibration.input_statistics import InputStatistics, output_loss
from backend.quantization.calibration.stages import InputStatisticsByGroup
from backend.quantization.methods.fitting import fitting
from backend.quantization.methods.ranges import by_hessian, searched_grid
from backend.quantization.methods.rounding import Rounded, round_to_nearest
from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.quantized_linear import Scheme

_ALPHAS = [step / 20 for step in range(20)]
_SMALLEST = 1e-4
"""Least mean magnitude: an input that is always zero gets a finite scale."""


def round_clipped(weights: Sequence[torch.Tensor], seen: InputStatistics, scheme: Scheme) -> list[Rounded]:
    """Rounds to nearest, with the range of each group shrunk to minimise its output loss; see `Rounding`.

    The loss of a group uses its block of the Hessian alone. Schemes other than `IntScheme` have no range to search:
    they round to nearest.
    """
    if not isinstance(scheme, IntScheme):
        return round_to_nearest(weights, seen, scheme)
    rounded = []
    for weight in weights:
        loss = by_hessian(seen.hessian.float(), scheme.groups(weight.shape[1]))
        grid = searched_grid(weight.float(), scheme, loss)
        rounded.append(Rounded(IntLinear.of(scheme, grid.encode(weight), grid)))
    return rounded


@dataclass(frozen=True, slots=True)
class ActivationScaling:
    """Scales a layer's matrices by input, and folds the inverse into the producer of the inputs.

    Args:
        scheme: of the quantised matrices.
        names: of experts.
        dtype: of the model's files.
    """

    config: ModelConfig
    scheme: Scheme
    names: ExpertNames
    dtype: torch.dtype

    def __call__(self, layer: DecoderLayer, seen: InputStatisticsByGroup) -> dict[str, torch.Tensor]:
        """Rescales a layer so that it computes the same and loses less by rounding.

        Args:
            seen: input statistics of each group of the unchanged layer.

        Returns:
            The other changed tensors, by their names within the layer, in ``dtype``.
        """
        # All scales are searched on the unchanged layer, and only then applied.
        found = {names: self._scales(layer, [names], seen) for names in layer.group("qkv") + layer.group("down")}
        before_mlp = self._scales(layer, layer.group("gate_up"), seen)
        changed: dict[str, torch.Tensor] = {}
        if not layer.shares_heads:  # with GQA, one value feeds several inputs of ``o_proj``
            changed |= self._into_rows(layer, V, [O], self._scales(layer, [(O,)], seen))
        for mlp in layer.mlps:
            changed |= self._into_rows(layer, mlp.up, [mlp.down], found[(mlp.down,)])
        (qkv,) = layer.group("qkv")
        changed |= self._into_norm(layer, "input", qkv, found[qkv])
        gates_ups = [name for names in layer.group("gate_up") for name in names]
        return changed | self._into_norm(layer, "mlp", gates_ups, before_mlp)

    def _scales(
        self, layer: DecoderLayer, groups: Sequence[tuple[str, ...]], seen: InputStatisticsByGroup
    ) -> torch.Tensor:
        """float32 [in], for matrices whose inputs have one producer."""
        magnitude = sum((seen[names].mean_magnitude * seen[names].rows for names in groups), torch.zeros(()))
        magnitude = (magnitude / max(sum(seen[names].rows for names in groups), 1)).float().clamp(min=_SMALLEST)
        pairs = [
            (torch.cat([layer.linears[name].weight for name in names]), seen[names].hessian.float() * seen[names].rows)
            for names in groups
        ]
        out_features, in_features = pairs[0][0].shape
        scheme, _ = fitting(self.scheme, out_features, in_features, FloatScheme())
        best, least = torch.ones_like(magnitude), torch.inf
        for alpha in _ALPHAS:
            scales = magnitude**alpha
            scales /= (scales.max() * scales.min()).sqrt()
            lost = 0.0
            for weight, hessian in pairs:
                kept = scheme.pack(weight * scales).unpack() / scales
                lost += float(output_loss(weight - kept, hessian).sum())
            if lost < least:
                best, least = scales, lost
        return best

    def _into_norm(
        self, layer: DecoderLayer, norm: str, names: Sequence[str], scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Adjusts the scales so that the rounded norm weight cancels them exactly."""
        weight, offset = layer.norms[norm], self.config.norm_offset
        written = (weight / scales - offset).to(self.dtype)
        taken = written.float() + offset
        exact = torch.where(taken != 0, weight / taken, 0.0)
        keep = (exact <= 0) | ~torch.isfinite(exact)
        written, exact = torch.where(keep, (weight - offset).to(self.dtype), written), torch.where(keep, 1.0, exact)
        layer.norms[norm] = torch.where(keep, weight, taken)
        for name in names:
            layer.linears[name].weight = layer.linears[name].weight * exact
        changed = {f"{self._norm_name(norm)}.weight": written}
        if norm == "mlp" and layer.router is not None:
            router = (layer.router * exact).to(self.dtype)
            layer.router = router.float()
            changed[f"{self.names.router}.weight"] = router
        return changed

    def _into_rows(
        self, layer: DecoderLayer, before: str, names: Sequence[str], scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        maker = layer.linears[before]
        bias = None if maker.bias is None else (maker.bias / scales).to(self.dtype)
        layer.linears[before] = DenseLinear(maker.weight / scales.unsqueeze(1), None if bias is None else bias.float())
        for name in names:
            layer.linears[name].weight = layer.linears[name].weight * scales
        return {} if bias is None else {f"{before}.bias": bias}

    def _norm_name(self, norm: str) -> str:
        if norm == "input":
            return "input_layernorm"
        return "pre_feedforward_layernorm" if self.config.output_norms else "post_attention_layernorm"
