"""BERT models of sentence-transformers: which the compiled encoder supports, their weights and their tokenizer."""

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from cache.semantic.embedding.errors import NativeUnavailable

Weights = dict[str, npt.NDArray[np.float32]]

_POOLINGS = ("mean", "cls")
_OLD_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_POSITIONS = "embeddings.position_embeddings.weight"


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
    pad_token_id: int | None = None
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    is_decoder: bool = False


class Bert(NamedTuple):
    """A model as its files say. Texts have `longest` tokens at most."""

    shape: BertShape
    pools_first: bool
    longest: int
    tokenizer: Tokenizer
    weights: Weights
    """By the names that BertModel of transformers gives them; positions from the first that a token may have."""


class _Module(msgspec.Struct):
    path: str
    type: str


class _Limit(msgspec.Struct):
    """Of sentence_bert_config.json, or, where that says nothing, of tokenizer_config.json."""

    max_seq_length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    model_max_length: float | None = None


def read_bert(folder: Path) -> Bert:
    """The model in a folder.

    Raises NativeUnavailable unless it is a BERT or XLM-RoBERTa, mean or cls pooling, and normalisation, with a
    tokenizer and finite weights in one file each.
    """
    try:
        modules = msgspec.json.decode((folder / "modules.json").read_bytes(), type=list[_Module])
        kinds = [module.type.rpartition(".")[2] for module in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise NativeUnavailable(f"it does not know a model of {', '.join(kinds)}")
        transformer = folder / modules[0].path
        shape = msgspec.json.decode((transformer / "config.json").read_bytes(), type=BertShape)
        pooling = msgspec.json.decode((folder / modules[1].path / "config.json").read_bytes())
        limits = [
            msgspec.json.decode((transformer / name).read_bytes(), type=_Limit)
            for name in ("sentence_bert_config.json", "tokenizer_config.json")
        ]
        _check(shape)
        tokenizer = Tokenizer.from_file(str(transformer / "tokenizer.json"))
        tensors = load_file(transformer / "model.safetensors")
    except NativeUnavailable:
        raise
    # The tokenizers and safetensors raise errors of their own, some without a class.
    except Exception as error:
        raise NativeUnavailable(f"it does not know a model with such files: {error}") from error
    prefixes = ("bert.", "roberta.")
    weights = {
        next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name): np.asarray(
            tensor, np.float32
        )
        for name, tensor in tensors.items()
    }
    if wrong := next((name for name, tensor in weights.items() if not np.isfinite(tensor).all()), None):
        raise NativeUnavailable(f"it cannot compute with {wrong}, which has numbers that are not finite")
    if shape.model_type == "xlm-roberta" and _POSITIONS in weights:
        # Positions count from the one after that of padding.
        first = (shape.pad_token_id or 0) + 1
        weights[_POSITIONS] = weights[_POSITIONS][first:]
        shape = msgspec.structs.replace(shape, max_position_embeddings=shape.max_position_embeddings - first)
    positions = shape.max_position_embeddings
    longest = min(limits[0].max_seq_length or limits[1].model_max_length or positions, positions)
    return Bert(shape, _pooling(pooling) == "cls", int(longest), tokenizer, weights)


def _check(shape: BertShape) -> None:
    known = {
        "model_type": ("bert", "xlm-roberta"), "hidden_act": ("gelu",), "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
    }  # fmt: skip
    for field, values in known.items():
        if getattr(shape, field) not in values:
            raise NativeUnavailable(f"it does not know a model whose {field} is {getattr(shape, field)!r}")
    if min(shape.num_hidden_layers, shape.num_attention_heads) < 1 or shape.hidden_size % shape.num_attention_heads:
        raise NativeUnavailable("it does not know a model without layers, or whose heads do not share its width evenly")


def _pooling(config: dict[str, object]) -> str:
    named = config.get("pooling_mode")
    modes = [named] if named else [_OLD_POOLINGS.get(key, key) for key, value in config.items() if value is True]
    modes = [mode for mode in modes if mode != "include_prompt"]
    if len(modes) != 1 or modes[0] not in _POOLINGS or config.get("include_prompt") is False:
        raise NativeUnavailable(f"it does not know the pooling {modes}, or one that leaves the prompt out")
    return str(modes[0])
