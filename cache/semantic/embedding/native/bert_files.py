"""BERT models of sentence-transformers: which the compiled encoder supports, and their weights."""

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from cache.semantic.embedding.errors import NativeUnavailable

Weights = dict[str, npt.NDArray[np.float32]]

_WEIGHTS_FILE = "model.safetensors"
_POOLINGS = ("mean", "cls")
_OLD_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_PREFIX = "bert."


class BertShape(msgspec.Struct, frozen=True):
    """Of a model's config.json, by the names of its keys; other keys change no vector."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    pooling: str = "mean"
    """Not of that file: mean or cls."""


class _Module(msgspec.Struct):
    path: str
    type: str


def bert_shape(folder: Path) -> BertShape:
    """The shape of the model in a folder.

    Raises NativeUnavailable unless it is a BERT, mean or cls pooling, and normalisation.
    """
    try:
        modules = msgspec.json.decode((folder / "modules.json").read_bytes(), type=list[_Module])
        kinds = [module.type.rpartition(".")[2] for module in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise NativeUnavailable(f"it does not know a model of {', '.join(kinds)}")
        shape = msgspec.json.decode((folder / modules[0].path / "config.json").read_bytes(), type=BertShape)
        pooling = _pooling(msgspec.json.decode((folder / modules[1].path / "config.json").read_bytes()))
    except (OSError, msgspec.DecodeError) as error:
        raise NativeUnavailable(f"it does not know a model with such files: {error}") from error
    expected = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
    for field, value in expected.items():
        if getattr(shape, field) != value:
            raise NativeUnavailable(f"it does not know a model whose {field} is {getattr(shape, field)!r}")
    if min(shape.num_hidden_layers, shape.num_attention_heads) < 1 or shape.hidden_size % shape.num_attention_heads:
        raise NativeUnavailable("it does not know a model without layers, or whose heads do not share its width evenly")
    return msgspec.structs.replace(shape, pooling=pooling)


def _pooling(config: dict[str, object]) -> str:
    named = config.get("pooling_mode")
    modes = [named] if named else [_OLD_POOLINGS.get(key, key) for key, value in config.items() if value is True]
    modes = [mode for mode in modes if mode != "include_prompt"]
    if len(modes) != 1 or modes[0] not in _POOLINGS or config.get("include_prompt") is False:
        raise NativeUnavailable(f"it does not know the pooling {modes}, or one that leaves the prompt out")
    return str(modes[0])


def bert_weights(folder: Path) -> Weights:
    """All weights of the model in a folder, float32, by the names that BertModel of transformers gives them.

    Raises NativeUnavailable if they are not in one safetensors file, or not finite floats.
    """
    modules = msgspec.json.decode((folder / "modules.json").read_bytes(), type=list[_Module])
    path = folder / modules[0].path / _WEIGHTS_FILE
    try:
        tensors = load_file(path)
    # KeyError: a type that numpy does not have.
    except (OSError, SafetensorError, KeyError) as error:
        raise NativeUnavailable(f"it cannot read {path}: {error}") from error
    floats = {name.removeprefix(_PREFIX): np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    if wrong := next((name for name, tensor in floats.items() if not np.isfinite(tensor).all()), None):
        raise NativeUnavailable(f"it cannot compute with {wrong} of {path}, which has numbers that are not finite")
    return floats
