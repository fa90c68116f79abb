"""The names by which weights in fewer bits are asked for. Light at import."""

from __future__ import annotations

from typing import Literal

Quantization = Literal["none", "auto", "int8", "int4", "fp8", "nf4", "gptq-int4", "awq-int4", "mixed"]
"""none: as they are in the model's files."""

CALIBRATED_QUANTIZATIONS: frozenset[Quantization] = frozenset({"gptq-int4", "awq-int4", "mixed"})
"""Made once, by a look at what is multiplied with the weights, and kept."""
