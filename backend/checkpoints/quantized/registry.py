"""The registry of checkpoint formats: which reader belongs to a `quant_method`, and what a reader must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from backend.checkpoints.quantized.awq import AwqReader
from backend.checkpoints.quantized.bitsandbytes import BitsAndBytesReader
from backend.checkpoints.quantized.compressed_tensors import CompressedTensorsReader
from backend.checkpoints.quantized.fp8 import Fp8Reader
from backend.checkpoints.quantized.gptq import GptqReader
from backend.checkpoints.tensor_store import TensorStore
from backend.models.json_fields import Fields
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


_READERS: Mapping[str, Callable[[Mapping[str, Any], TensorStore, str], CheckpointReader]] = {
    "gptq": GptqReader,
    "awq": AwqReader,
    "compressed-tensors": CompressedTensorsReader,
    "fp8": Fp8Reader,
    "fbgemm_fp8": Fp8Reader,
    "bitsandbytes": BitsAndBytesReader,
}
"""By ``quant_method``. A reader takes the ``quantization_config``, the tensors, and where the config is from, for
messages; it raises ModelError, which names the field, for what it does not read."""
_FIELDS = ("quantization_config", "compression_config")
"""The second is what compressed-tensors called the first."""


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What ``config.json`` says of quantised weights, at its top or in the part of a model that reads text.

    None where it says nothing.

    Raises:
        ModelError: it is not an object.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for field in _FIELDS:
            if (values := part.get(field)) is not None:
                if not isinstance(values, dict):
                    raise Fields(part, "config.json").error(field, "an object")
                return values
    return None


def checkpoint_reader(values: Mapping[str, Any], store: TensorStore, source: str) -> CheckpointReader:
    """What reads the quantised weights of a directory.

    Args:
        values: ``quantization_config``.
        store: of the directory.
        source: where ``values`` are from, for messages.

    Raises:
        ModelError: weights in this form, or with these settings, are not read here; names the field.
    """
    # Old files of bitsandbytes do not say by whom they were made.
    method = values.get("quant_method", "bitsandbytes" if "load_in_4bit" in values else None)
    if not isinstance(method, str) or method not in _READERS:
        raise Fields(values, source).error("quant_method", f"one of {', '.join(_READERS)}")
    return _READERS[method](values, store, source)
