"""The values of ``--quantization``. Cheap to import."""

from __future__ import annotations

from typing import Literal

Quantization = Literal["none", "auto", "int8", "int4", "fp8", "nf4", "gptq-int4", "awq-int4", "mixed"]
"""none: as they are in the model's files."""

CALIBRATED_QUANTIZATIONS: frozenset[Quantization] = frozenset({"gptq-int4", "awq-int4", "mixed"})
"""Made once, with calibration data, and cached."""
