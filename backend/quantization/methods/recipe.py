"""What is to be done to a model: how codes are chosen, and what each matrix is kept in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from backend.quantization.calibration.decoder_layer import Group
from backend.quantization.float_scheme import FloatScheme
from backend.quantization.methods.fitting import fitting
from backend.quantization.methods.gptq import ActOrder, Gptq
from backend.quantization.methods.rounded import Rounding, round_to_nearest
from backend.quantization.quantized_linear import Scheme

Method = Literal["rtn", "gptq", "awq", "mixed"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "mixed")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method and its options.

    Args:
        method: rtn rounds to nearest.
        scheme: of every matrix that it fits.
        act_order: of GPTQ.
        left: what becomes of matrices that cannot be quantised.
    """

    method: Method
    scheme: Scheme
    act_order: ActOrder = "weight"
    left: FloatScheme = FloatScheme()  # noqa: RUF009 - frozen

    @property
    def rounding(self) -> Rounding:
        """Chooses the codes."""
        return Gptq(self.act_order) if self.method == "gptq" else round_to_nearest

    def schemes(self, layer: int, group: Group, out_features: int, in_features: int) -> tuple[Scheme, str | None]:
        """See `Schemes`."""
        return fitting(self.scheme, out_features, in_features, self.left)

    def made_of(self) -> dict[str, Any]:
        """As JSON values, for a report and to tell one from another."""
        return {"method": self.method, "scheme": self.scheme.name, "act_order": self.act_order}
