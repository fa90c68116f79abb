"""What is to be done to a model: how codes are chosen, and what each matrix is kept in."""

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
"""Of what the methods compute: raised when the same recipe makes something else."""

Bits = dict[tuple[int, Group], int]
"""Of a layer's group."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method and its options.

    Args:
        method: rtn rounds to nearest; gptq; awq; mixed gives each group of matrices 4 bits (in ``scheme``), 8 or 16,
            and rounds by GPTQ.
        scheme: of every matrix that it fits, and that mixed gives 4 bits.
        act_order: of GPTQ.
        average_bits: mixed: of a weight, scales included, at most.
        max_kl: mixed: of the predictions, nats a token, as the groups' own add up, at most. One of the two is given.
        left: what becomes of matrices that cannot be quantised.
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
        """Of every matrix.

        Args:
            bits: what mixed precision chose; None: all have the one scheme.
        """
        if bits is None:
            return self._all_in(self.scheme)
        forms = self.forms

        def chosen(layer: int, group: Group, out_features: int, in_features: int) -> tuple[Scheme, str | None]:
            return forms[bits[layer, group]](layer, group, out_features, in_features)

        return chosen

    def choose(self, sensitivities: list[Sensitivity], weights: int) -> Bits:
        """Bits for every group, by what it loses and takes.

        Args:
            sensitivities: of every group in every form.
            weights: how many the matrices have together.

        Raises:
            CannotQuantize: nothing is within the budget.
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
        """Raises CannotQuantize where matrices of these shapes [out, in] take more than ``average_bits`` at least."""
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

    def made_of(self) -> dict[str, Any]:
        """As JSON values, for a report and to tell one from another."""
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
