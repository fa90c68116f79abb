"""The registry of checkpoint formats: the reader of each `quant_method`, and the contract of readers."""

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
    """Reads linear layers by their names. Immutable; keeps the files open, but no weights."""

    def linear(self, name: str, out_features: int, in_features: int) -> QuantizedLinear | None:
        """A layer's weight; None if the checkpoint has it as plain floats.

        Args:
            name: of the module, such as ``model.layers.0.self_attn.q_proj``.

        Raises:
            ModelError: a tensor is missing, of the wrong shape or dtype, or invalid; names it and its file.
        """


_READERS: Mapping[str, Callable[[Mapping[str, Any], TensorStore, str], CheckpointReader]] = {
    "gptq": GptqReader,
    "awq": AwqReader,
    "compressed-tensors": CompressedTensorsReader,
    "fp8": Fp8Reader,
    "fbgemm_fp8": Fp8Reader,
    "bitsandbytes": BitsAndBytesReader,
}
"""By ``quant_method``. A reader takes the ``quantization_config``, the tensors, and the config's source, for messages;
it raises ModelError, which names the field, for unsupported values."""
_FIELDS = ("quantization_config", "compression_config")
"""The second is compressed-tensors' former name."""


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantisation field of ``config.json``, at its top or in ``text_config``.

    None if there is none.

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
    """The reader for the quantised weights of a directory.

    Args:
        values: ``quantization_config``.
        store: of the directory.
        source: of ``values``, for messages.

    Raises:
        ModelError: the format or a setting is not supported; names the field.
    """
    # Old files of bitsandbytes have no ``quant_method``.
    method = values.get("quant_method", "bitsandbytes" if "load_in_4bit" in values else None)
    if not isinstance(method, str) or method not in _READERS:
        raise Fields(values, source).error("quant_method", f"one of {', '.join(_READERS)}")
    return _READERS[method](values, store, source)
