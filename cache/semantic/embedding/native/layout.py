"""Weights of a BERT as `bert.cpp` reads them: its matrices as integers, and all in one block of memory."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cache.semantic.embedding.errors import NativeUnavailable
from cache.semantic.embedding.native.bert_files import Bert

ALIGNMENT = 64
_WEIGHT_MAX, _INT32_MAX = 2**11 - 1, 2**31 - 1
# Below all weights of a model; its inverse is still a finite float.
_MIN = 1e-30

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Shape(ctypes.Structure):
    """BertShape of `bert.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "inner", "vocabulary", "longest")),
        *((name, ctypes.c_int32) for name in ("type_vocabulary", "pools_first")),
        ("eps", ctypes.c_float),
    )

    @classmethod
    def of(cls, bert: Bert) -> "Shape":
        shape = bert.shape
        return cls(
            *(shape.num_hidden_layers, shape.hidden_size, shape.num_attention_heads, shape.intermediate_size),
            *(shape.vocab_size, shape.max_position_embeddings, shape.type_vocab_size, bert.pools_first),
            shape.layer_norm_eps,
        )


def packed_model(bert: Bert, panel: int, activation_max: int) -> Bytes:
    """All weights in the order in which `bert.cpp` reads them, each array at a multiple of 64 bytes.

    Args:
        panel: columns of a panel of a matrix; every width is filled up to a multiple of it.
        activation_max: the largest integer of an activation.

    Raises:
        NativeUnavailable: the weights are not those of the shape.
    """
    shape, parts = bert.shape, list[npt.NDArray[np.generic]]()
    hidden, inner = shape.hidden_size, shape.intermediate_size

    def take(name: str, *size: int) -> Floats:
        if bert.weights[name].shape != size:
            raise ValueError(f"{name} is {bert.weights[name].shape}, not {size}")
        return bert.weights[name]

    def put_floats(array: Floats) -> None:
        parts.append(_padded(array, (1,) * (array.ndim - 1) + (panel,)))

    def put_norm(name: str) -> None:
        put_floats(take(f"{name}.weight", hidden))
        put_floats(take(f"{name}.bias", hidden))

    def put_linear(names: Sequence[str], out: int, inputs: int) -> None:
        """Matrices [out, in] of one input, one below the other."""
        weight = np.concatenate([take(f"{name}.weight", out, inputs) for name in names])
        integers, scales = rounded(_padded(weight, (panel, panel)), activation_max)
        parts.append(packed(integers, panel))
        put_floats(scales)
        put_floats(np.concatenate([take(f"{name}.bias", out) for name in names]))

    try:
        put_floats(take("embeddings.word_embeddings.weight", shape.vocab_size, hidden))
        put_floats(take("embeddings.position_embeddings.weight", shape.max_position_embeddings, hidden))
        put_floats(take("embeddings.token_type_embeddings.weight", shape.type_vocab_size, hidden))
        put_norm("embeddings.LayerNorm")
        for layer in (f"encoder.layer.{i}" for i in range(shape.num_hidden_layers)):
            put_linear([f"{layer}.attention.self.{part}" for part in ("query", "key", "value")], hidden, hidden)
            put_linear([f"{layer}.attention.output.dense"], hidden, hidden)
            put_norm(f"{layer}.attention.output.LayerNorm")
            put_linear([f"{layer}.intermediate.dense"], inner, hidden)
            put_linear([f"{layer}.output.dense"], hidden, inner)
            put_norm(f"{layer}.output.LayerNorm")
    except (KeyError, ValueError) as error:
        raise NativeUnavailable(f"its weights are not those of its config.json: {error}") from error
    return _joined(parts)


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
    memory = np.empty(size + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:size]


def _padded(array: Floats, multiples: tuple[int, ...]) -> Floats:
    return np.pad(array, [(0, -size % multiple) for size, multiple in zip(array.shape, multiples, strict=True)])


def _joined(parts: Sequence[npt.NDArray[np.generic]]) -> Bytes:
    """Arrays in one block of memory.

    One block, since numpy requests pages of 2 MiB for a large block: a call reads all of it, and in a virtual machine a
    TLB miss costs two page walks.
    """
    block = aligned(sum(part.nbytes + -part.nbytes % ALIGNMENT for part in parts))
    end = 0
    for part in parts:
        block[end : end + part.nbytes] = part.reshape(-1).view(np.uint8)
        end += part.nbytes + -part.nbytes % ALIGNMENT
    return block
