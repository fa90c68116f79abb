"""BERT models of sentence-transformers: which the compiled encoder supports, and their weights for `bert.cpp`."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from cache.semantic.embedding.errors import NativeUnavailable

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 64
_WEIGHT_MAX, _INT32_MAX = 2**11 - 1, 2**31 - 1
# Below all weights of a model; its inverse is still a finite float.
_MIN = 1e-30

_Size = Annotated[int, msgspec.Meta(ge=1, le=_INT32_MAX)]

_KNOWN = "encoders of the types bert and xlm-roberta, with gelu and absolute positions"
_POOLS_FIRST = {"mean": False, "pooling_mode_mean_tokens": False, "cls": True, "pooling_mode_cls_token": True}
_POSITIONS = "embeddings.position_embeddings.weight"


class Config(msgspec.Struct):
    """Of a model's config.json, the first seven in the order of BertShape; other keys change no vector."""

    num_hidden_layers: _Size
    hidden_size: _Size
    num_attention_heads: _Size
    intermediate_size: _Size
    vocab_size: _Size
    max_position_embeddings: _Size
    type_vocab_size: _Size
    model_type: Literal["bert", "xlm-roberta"]
    pad_token_id: Annotated[int, msgspec.Meta(ge=0)] | None = None
    layer_norm_eps: float = 1e-12
    hidden_act: Literal["gelu"] = "gelu"
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: bool = False

    def __post_init__(self) -> None:
        if self.is_decoder:
            raise ValueError("is_decoder is true")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads do not share hidden_size evenly")


class _Module(msgspec.Struct):
    path: str
    type: str


class _Limit(msgspec.Struct):
    """Of sentence_bert_config.json, or, where that says nothing, of tokenizer_config.json."""

    max_seq_length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    model_max_length: float | None = None


class Bert(NamedTuple):
    """A model as its files say."""

    config: Config
    shape: bytes
    """The BertShape of `bert.cpp`."""
    tokenizer: Tokenizer
    """Truncates a text where the model's pipeline does."""
    weights: dict[str, Floats]
    """By the names that BertModel of transformers gives them; positions from the first that a token may have."""


def read_bert(folder: Path) -> Bert:
    """The model in a folder.

    Raises NativeUnavailable unless it is a BERT or XLM-RoBERTa, mean or cls pooling, and normalisation, with a
    tokenizer and finite weights in one file each.
    """
    try:
        modules = msgspec.json.decode((folder / "modules.json").read_bytes(), type=list[_Module])
        kinds = [module.type.rpartition(".")[2] for module in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise ValueError(f"it does not know a model of {', '.join(kinds)}")
        transformer = folder / modules[0].path
        config = msgspec.json.decode((transformer / "config.json").read_bytes(), type=Config)
        pooling = msgspec.json.decode((folder / modules[1].path / "config.json").read_bytes(), type=dict[str, object])
        of_model, of_tokenizer = (
            msgspec.json.decode((transformer / name).read_bytes(), type=_Limit)
            for name in ("sentence_bert_config.json", "tokenizer_config.json")
        )
        tokenizer = Tokenizer.from_file(str(transformer / "tokenizer.json"))
        tensors = load_file(transformer / "model.safetensors")
    # The tokenizers and safetensors raise errors of their own, some without a class.
    except Exception as error:
        raise NativeUnavailable(f"it knows {_KNOWN}, and no model with such files: {error}") from error
    weights = {
        name.removeprefix("bert.").removeprefix("roberta."): np.asarray(tensor, np.float32)
        for name, tensor in tensors.items()
    }
    if wrong := next((name for name, tensor in weights.items() if not np.isfinite(tensor).all()), None):
        raise NativeUnavailable(f"it cannot compute with {wrong}, which has numbers that are not finite")
    if config.model_type == "xlm-roberta" and _POSITIONS in weights:
        # Positions count from the one after that of padding.
        first = (config.pad_token_id or 0) + 1
        weights[_POSITIONS] = weights[_POSITIONS][first:]
        config.max_position_embeddings -= first
    positions = config.max_position_embeddings
    if positions < 1:
        raise NativeUnavailable(f"pad_token_id is {config.pad_token_id}, which leaves no position for a token")
    tokenizer.no_padding()
    longest = of_model.max_seq_length or of_tokenizer.model_max_length or positions
    tokenizer.enable_truncation(int(min(longest, positions)))
    sizes = msgspec.structs.astuple(config)[:7]
    shape = struct.pack("8if", *sizes, _pools_first(pooling), config.layer_norm_eps)
    return Bert(config, shape, tokenizer, weights)


def _pools_first(config: dict[str, object]) -> bool:
    """Whether a text's vector is that of its first token, and not the mean."""
    named = config.get("pooling_mode")
    modes = [named] if named else [key for key, value in config.items() if value is True and key != "include_prompt"]
    if len(modes) != 1 or str(modes[0]) not in _POOLS_FIRST or config.get("include_prompt") is False:
        raise NativeUnavailable(f"it does not know the pooling {modes}, or one that leaves the prompt out")
    return _POOLS_FIRST[str(modes[0])]


def packed_model(bert: Bert, panel: int, activation_max: int) -> Bytes:
    """All weights in the order in which `bert.cpp` reads them, each array at a multiple of 64 bytes.

    They are in one block of memory, since numpy requests pages of 2 MiB for a large block: a call reads all of it, and
    in a virtual machine a TLB miss costs two page walks.

    Args:
        panel: columns of a panel of a matrix; every width is filled up to a multiple of it.
        activation_max: the largest integer of an activation.

    Raises:
        NativeUnavailable: the weights are not those of the config.
    """
    config, parts = bert.config, list[Bytes]()
    hidden, inner = config.hidden_size, config.intermediate_size

    def take(name: str, *size: int) -> Floats:
        if bert.weights[name].shape != size:
            raise ValueError(f"{name} is {bert.weights[name].shape}, not {size}")
        return bert.weights[name]

    def put(array: npt.NDArray[np.generic]) -> None:
        parts.append(array.reshape(-1).view(np.uint8))
        parts.append(np.zeros(-array.nbytes % _ALIGNMENT, np.uint8))

    def put_floats(array: Floats) -> None:
        put(_padded(array, (1,) * (array.ndim - 1) + (panel,)))

    def put_norm(name: str) -> None:
        put_floats(take(f"{name}.weight", hidden))
        put_floats(take(f"{name}.bias", hidden))

    def put_linear(names: Sequence[str], out: int, inputs: int) -> None:
        """Matrices [out, in] of one input, one below the other."""
        weight = np.concatenate([take(f"{name}.weight", out, inputs) for name in names])
        integers, scales = rounded(_padded(weight, (panel, panel)), activation_max)
        put(packed(integers, panel))
        put_floats(scales)
        put_floats(np.concatenate([take(f"{name}.bias", out) for name in names]))

    try:
        put_floats(take("embeddings.word_embeddings.weight", config.vocab_size, hidden))
        put_floats(take(_POSITIONS, config.max_position_embeddings, hidden))
        put_floats(take("embeddings.token_type_embeddings.weight", config.type_vocab_size, hidden))
        put_norm("embeddings.LayerNorm")
        for layer in (f"encoder.layer.{i}" for i in range(config.num_hidden_layers)):
            put_linear([f"{layer}.attention.self.{part}" for part in ("query", "key", "value")], hidden, hidden)
            put_linear([f"{layer}.attention.output.dense"], hidden, hidden)
            put_norm(f"{layer}.attention.output.LayerNorm")
            put_linear([f"{layer}.intermediate.dense"], inner, hidden)
            put_linear([f"{layer}.output.dense"], hidden, inner)
            put_norm(f"{layer}.output.LayerNorm")
    except (KeyError, ValueError) as error:
        raise NativeUnavailable(f"its weights are not those of its config.json: {error}") from error
    return np.concatenate(parts, out=aligned(sum(part.nbytes for part in parts)))


def rounded(weight: Floats, activation_max: int) -> tuple[npt.NDArray[np.int16], Floats]:
    """Integers of a matrix [out, in], and their scale for each output, [out].

    As fine as possible with an output's sum of products below 2^31 for any activations: each of `in` numbers may be
    rounded up by half a unit.
    """
    sizes = np.abs(weight)
    most = _INT32_MAX // activation_max - weight.shape[1] / 2
    by_sum, by_largest = (np.maximum(each, _MIN) for each in (sizes.sum(axis=1), sizes.max(axis=1)))
    factors = np.minimum(most / by_sum, _WEIGHT_MAX / by_largest)
    integers = np.rint(weight * factors[:, None]).astype(np.int16)
    return integers, (1 / factors).astype(np.float32)


def packed(integers: npt.NDArray[np.int16], panel: int) -> npt.NDArray[np.int8]:
    """Integers of 12 bits, [out, in], as `bert.cpp` unpacks them: bytes [out / panel, in / 4, 6 * panel]."""
    out, inputs = integers.shape
    vectors = integers.reshape(out // panel, 2, panel // 2, inputs // 4, 2, 2).transpose(0, 3, 4, 1, 2, 5)
    vectors = vectors.reshape(out // panel, inputs // 4, 4, panel)
    low = ((vectors & 15).astype(np.uint16) << np.array([[0], [4], [8], [12]], np.uint16)).sum(axis=2, dtype=np.uint16)
    high = (vectors >> 4).astype(np.int8).reshape(*low.shape[:2], -1)
    return np.concatenate([high, low.view(np.int8)], axis=2)


def aligned(size: int) -> Bytes:
    """Bytes [size] that begin at a multiple of 64."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % _ALIGNMENT :][:size]


def _padded(array: Floats, multiples: tuple[int, ...]) -> Floats:
    return np.pad(array, [(0, -size % multiple) for size, multiple in zip(array.shape, multiples, strict=True)])
