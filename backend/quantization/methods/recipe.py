"""A quantisation recipe: how codes are chosen, and the scheme of each matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from backend.quantization.calibration.decoder_layer import Group
from backend.quantization.methods.allocation import Choice, least_loss, least_size
from backend.quantization.methods.awq import round_clipped
from backend.quantization.methods.fitting import Schemes, fitting
from backend.quantization.methods.gptq import ActOrder, Gptq
from backend.quantization.methods.rounding import Rounding, round_to_nearest
from backend.quantization.methods.sensitivity import Sensitivity
from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.quantized_linear import CannotQuantize, Scheme

Method = Literal["rtn", "gptq", "awq", "mixed"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "mixed")

REVISION = 2
"""Of the methods: raised when the result of a recipe changes."""

Bits = dict[tuple[int, Group], int]
"""By layer and group."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method and its options.

    Args:
        method: rtn rounds to nearest; gptq; awq; mixed gives each group of matrices 4 bits (in ``scheme``), 8 or 16,
            and rounds by GPTQ.
        scheme: of every matrix that it fits; with mixed, of those with 4 bits.
        act_order: of GPTQ.
        average_bits: mixed: most bits per weight, scales included.
        max_kl: mixed: most KL of the predictions, nats per token, as the sum over groups. One of the two is given.
        left: scheme of matrices that cannot be quantised.
    """

    method: Method
    scheme: Scheme
    act_order: ActOrder = "weight"
    average_bits: float | None = None
    max_kl: float | None = None
    left: FloatScheme = FloatScheme()  # noqa: RUF009 - frozen

    @property
    def rounding(self) -> Rounding:
        """Chooses the codes."""
        match self.method:
            case "rtn":
                return round_to_nearest
            case "awq":
                return round_clipped
            case "gptq" | "mixed":
                return Gptq(self.act_order)

    @property
    def forms(self) -> dict[int, Schemes]:
        """The schemes that mixed precision may choose, by bits."""
        return {4: self._all_in(self.scheme), 8: self._all_in(IntScheme(8)), 16: self._all_in(self.left)}

    def schemes(self, bits: Bits | None) -> Schemes:
        """The scheme of every matrix.

        Args:
            bits: of mixed precision; None: all have one scheme.
        """
        if bits is None:
            return self._all_in(self.scheme)
        forms = self.forms

        def chosen(layer: int, group: Group, out_features: int, in_features: int) -> tuple[Scheme, str | None]:
            return forms[bits[layer, group]](layer, group, out_features, in_features)

        return chosen

    def choose(self, sensitivities: list[Sensitivity], weights: int) -> Bits:
        """Chooses each group's bits by loss and size.

        Args:
            sensitivities: of every group in every form.
            weights: number of weights in all matrices.

        Raises:
            CannotQuantize: no choice is within the budget.
        """
        parts: dict[tuple[int, Group], list[Sensitivity]] = {}
        for sensitivity in sensitivities:
            parts.setdefault((sensitivity.layer, sensitivity.group), []).append(sensitivity)
        choices = [[Choice(form.size, form.kl) for form in forms] for forms in parts.values()]
        if self.average_bits is not None:
            indices = least_loss(choices, int(self.average_bits * weights))
        else:
            indices = least_size(choices, self.max_kl or 0.0)
        return {place: forms[index].bits for (place, forms), index in zip(parts.items(), indices, strict=True)}

    def check_budget(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Raises CannotQuantize if matrices of these shapes [out, in] need more than ``average_bits``."""
        if self.average_bits is None:
            return
        smallest = [fitting(self.scheme, out, size, self.left)[0].bits_per_weight(out, size) for out, size in shapes]
        weights = [out * size for out, size in shapes]
        least = sum(bits * count for bits, count in zip(smallest, weights, strict=True)) / sum(weights)
        if least > self.average_bits:
            raise CannotQuantize(
                f"an average of {self.average_bits:g} bits cannot be had: all in {self.scheme.name} has {least:.2f}; "
                "expected that at least"
            )

    def provenance(self) -> dict[str, Any]:
        """As JSON values, for reports and for comparison."""
        return {
            "method": self.method,
            "revision": REVISION,
            "scheme": self.scheme.name,
            "act_order": self.act_order,
            "average_bits": self.average_bits,
            "max_kl": self.max_kl,
        }

    def _all_in(self, scheme: Scheme) -> Schemes:
        def fitted(layer: int, group: Group, out_features: int, in_features: int) -> tuple[Scheme, str | None]:
            return fitting(scheme, out_features, in_features, self.left)

        return fitted
