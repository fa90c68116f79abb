"""The contract of what reads one way of keeping quantised weights in a checkpoint."""

from __future__ import annotations

from typing import Protocol

from backend.quantized_weights.quantized_linear import QuantizedLinear


class CheckpointReader(Protocol):
    """Reads linear layers by their names. Immutable; it keeps the files open, and no weights."""

    def linear(self, name: str, out_features: int, in_features: int) -> QuantizedLinear | None:
        """A layer's weight; None where the checkpoint has it as plain floats, or has no such layer.

        Args:
            name: of the module, such as ``model.layers.0.self_attn.q_proj``.

        Raises:
            ModelError: a tensor is missing, of the wrong shape or dtype, or says what cannot be; names it and its file.
        """
