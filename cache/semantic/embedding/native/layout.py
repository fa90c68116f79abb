"""Weights of a BERT as `bert.cpp` reads them: its structures, and its matrices as integers."""

import ctypes

import numpy as np
import numpy.typing as npt

from cache.semantic.embedding.errors import NativeUnavailable
from cache.semantic.embedding.native.bert_files import BertShape, Weights

_POINTER, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
_ALIGNMENT = 64
_WEIGHT_MAX, _INT32_MAX = 2**11 - 1, 2**31 - 1
# Below all weights of a model; its inverse is still a finite float.
_MIN = 1e-30

Floats = npt.NDArray[np.float32]


class Linear(ctypes.Structure):
    _fields_ = (*((name, _POINTER) for name in ("panels", "scales", "bias")), ("inputs", _INT32), ("out", _INT32))


class Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Linear) for name in ("qkv", "output", "up", "down")),
        *((name, Norm) for name in ("attention_norm", "output_norm")),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("layer", "words", "positions", "types")),
        ("norm", Norm),
        *((name, _INT32) for name in ("layers", "hidden", "heads", "vocabulary", "longest", "type_vocabulary")),
        ("pools_first", _INT32),
        ("eps", _FLOAT),
    )


class BertLayout:
    """A model in one block of memory, in the order in which it is read; `model` points into it.

    Args:
        lanes: floats of a vector of the library; a panel is two vectors wide.
        activation_max: the largest integer of an activation.

    Raises:
        NativeUnavailable: the weights are not those of the shape.
    """

    def __init__(self, shape: BertShape, weights: Weights, lanes: int, activation_max: int) -> None:
        self._panel = 2 * lanes
        self._activation_max = activation_max
        self._arrays: dict[str, npt.NDArray[np.generic]] = {}
        try:
            self._arrange(shape, weights)
        except (KeyError, ValueError) as error:
            raise NativeUnavailable(f"its weights are not those of its config.json: {error}") from error
        self._memory, self._address = _placed(self._arrays)
        self._layers = (Layer * shape.num_hidden_layers)(*(self._layer(i) for i in range(shape.num_hidden_layers)))
        self._arrays.clear()
        self.model = Model(
            ctypes.addressof(self._layers),
            *(self._address[name] for name in ("words", "positions", "types")),
            self._norm("norm"),
            *(shape.num_hidden_layers, shape.hidden_size, shape.num_attention_heads),
            *(shape.vocab_size, shape.max_position_embeddings, shape.type_vocab_size),
            int(shape.pooling == "cls"),
            shape.layer_norm_eps,
        )

    def _arrange(self, shape: BertShape, weights: Weights) -> None:
        hidden, inner = shape.hidden_size, shape.intermediate_size

        def take(name: str, *size: int) -> Floats:
            if weights[name].shape != size:
                raise ValueError(f"{name} is {weights[name].shape}, not {size}")
            return weights[name]

        def take_norm(to: str, name: str) -> None:
            self._add_floats(f"{to}.weight", take(f"{name}.weight", hidden))
            self._add_floats(f"{to}.bias", take(f"{name}.bias", hidden))

        tables = {"word": shape.vocab_size, "position": shape.max_position_embeddings}
        for name, rows in (tables | {"token_type": shape.type_vocab_size}).items():
            table = take(f"embeddings.{name}_embeddings.weight", rows, hidden)
            self._add_floats({"token_type": "types"}.get(name, f"{name}s"), table)
        take_norm("norm", "embeddings.LayerNorm")
        for i in range(shape.num_hidden_layers):
            of = f"encoder.layer.{i}"
            parts = [f"{of}.attention.self.{part}" for part in ("query", "key", "value")]
            self._add_linear(
                f"{i}.qkv",
                np.concatenate([take(f"{part}.weight", hidden, hidden) for part in parts]),
                np.concatenate([take(f"{part}.bias", hidden) for part in parts]),
            )
            for to, name, out, inputs in (
                ("output", "attention.output.dense", hidden, hidden),
                ("up", "intermediate.dense", inner, hidden),
                ("down", "output.dense", hidden, inner),
            ):
                self._add_linear(f"{i}.{to}", take(f"{of}.{name}.weight", out, inputs), take(f"{of}.{name}.bias", out))
            take_norm(f"{i}.attention_norm", f"{of}.attention.output.LayerNorm")
            take_norm(f"{i}.output_norm", f"{of}.output.LayerNorm")

    def _add_floats(self, name: str, array: Floats) -> None:
        self._arrays[name] = _padded(array, (1,) * (array.ndim - 1) + (self._panel,))

    def _add_linear(self, name: str, weight: Floats, bias: Floats) -> None:
        """Of a matrix [out, in]."""
        weight = _padded(weight, (self._panel, self._panel))
        integers, scales = rounded(weight, self._activation_max)
        self._arrays[f"{name}.panels"] = packed(integers, self._panel)
        self._add_floats(f"{name}.scales", scales)
        self._add_floats(f"{name}.bias", bias)

    def _layer(self, i: int) -> Layer:
        linears = (self._linear(f"{i}.{name}") for name in ("qkv", "output", "up", "down"))
        return Layer(*linears, self._norm(f"{i}.attention_norm"), self._norm(f"{i}.output_norm"))

    def _linear(self, name: str) -> Linear:
        panels, fours, _ = self._arrays[f"{name}.panels"].shape
        pointers = (self._address[f"{name}.{part}"] for part in ("panels", "scales", "bias"))
        return Linear(*pointers, 4 * fours, panels * self._panel)

    def _norm(self, name: str) -> Norm:
        return Norm(self._address[f"{name}.weight"], self._address[f"{name}.bias"])


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


def _padded(array: Floats, multiples: tuple[int, ...]) -> Floats:
    return np.pad(array, [(0, -size % multiple) for size, multiple in zip(array.shape, multiples, strict=True)])


def _placed(arrays: dict[str, npt.NDArray[np.generic]]) -> tuple[npt.NDArray[np.uint8], dict[str, int]]:
    """A block of memory with all arrays, and the address of each.

    One block, since numpy requests pages of 2 MiB for a large block: a call reads all of it, and in a virtual machine a
    TLB miss costs two page walks.
    """
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name] = end
        end += array.nbytes + -array.nbytes % _ALIGNMENT
    memory = np.empty(end + _ALIGNMENT, np.uint8)
    base = -memory.ctypes.data % _ALIGNMENT
    for name, array in arrays.items():
        place = memory[base + starts[name] :][: array.nbytes].view(array.dtype).reshape(array.shape)
        place[...] = array
    return memory, {name: memory.ctypes.data + base + start for name, start in starts.items()}
