"""The format of compressed-tensors: reads and writes integers, in words or bytes, and eight-bit floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from backend.checkpoints.module_tensors import ModuleTensors
from backend.checkpoints.quantized.fp8 import block_shape, fp8_linear
from backend.checkpoints.quantized.integer_weights import (
    check_shape,
    group_order,
    int_linear,
    pack_words,
    unpack_words,
    words_of,
)
from backend.checkpoints.quantized.targets import Targets
from backend.checkpoints.tensor_store import TensorStore
from backend.errors import ModelError
from backend.models.json_fields import Fields
from backend.quantized_weights.fp8_scheme import Fp8Linear
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.quantized_linear import CannotQuantize, QuantizedLinear

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_OF_INTEGERS = (PACKED, INTEGERS, "naive-quantized")
_OF_FLOATS = (FLOATS, "naive-quantized")
_ZERO_POINT, _GROUP_INDEX = "weight_zero_point", "weight_g_idx"
_IN_OTHER_ORDER = ("group", "dynamic")
"""Values of ``actorder`` with which groups of inputs are not contiguous in the file."""


class CompressedTensorsReader:
    """Groups of modules, by name, pattern or class, each with its own scheme."""

    def __init__(self, values: Mapping[str, Any], store: TensorStore, source: str) -> None:
        fields = Fields(values, source)
        self._store = store
        self._source = source
        sparsity = values.get("sparsity_config")
        if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense"):
            raise fields.error("sparsity_config", "absent: weights must not be sparse")
        transforms = values.get("transform_config")
        if transforms and transforms != {"config_groups": {}}:
            raise fields.error("transform_config", "absent: rows must be multiplied as they are")
        groups = values.get("config_groups")
        if not isinstance(groups, dict) or not groups or not all(isinstance(of, dict) for of in groups.values()):
            raise fields.error("config_groups", "an object of objects")
        self._groups = [
            WeightGroup(Fields(of, f"{source}: config_groups.{name}"), values.get("format"))
            for name, of in groups.items()
            if of.get("weights") is not None  # else of activations only, or of the KV cache
        ]
        self._ignored = Targets(fields, "ignore")

    def linear(self, name: str, out_features: int, in_features: int) -> QuantizedLinear | None:
        """See `CheckpointReader.linear`."""
        module = ModuleTensors(self._store, name, out_features, in_features)
        group = None if self._ignored.match(name) else self._group(name)
        if module.is_plain and not module.has("weight_scale"):
            if group is not None:
                raise module.error("weight", f"is plain, and {self._source} says that it is {group.form}")
            return None
        if group is None:
            raise module.error("weight", f"is not plain, and {self._source} names no group for it")
        return group.read(module)

    def _group(self, name: str) -> WeightGroup | None:
        """The most specific group for a module: by its name, by a pattern, by its class."""
        ranks = {group: group.targets.match(name) for group in self._groups}
        return max((group for group in self._groups if ranks[group]), key=lambda group: ranks[group], default=None)


class WeightGroup:
    """An entry of ``config_groups``.

    Args:
        form: the config's format for all groups; a group may override it.

    Raises:
        ModelError: the value of a field is not supported; names it.
    """

    def __init__(self, fields: Fields, form: object) -> None:
        self.targets = Targets(fields, "targets")
        self.form = fields.values.get("format") or form
        weights = fields.values.get("weights")
        if not isinstance(weights, dict):
            raise fields.error("weights", "an object")
        of_weights = Fields(weights, f"{fields.source}.weights")
        match weights.get("type"):
            case "int":
                self._how: _Integers | _Floats = _Integers(of_weights, self.form == PACKED, _activation_bits(fields))
                forms: tuple[str, ...] = _OF_INTEGERS
            case "float":
                self._how, forms = _Floats(of_weights), _OF_FLOATS
            case _:
                raise of_weights.error("type", "'int' or 'float'")
        if self.form not in forms:
            raise ModelError(
                f"{fields.source}: format is {self.form!r}, here or for all groups, expected {' or '.join(forms)}"
            )

    def read(self, module: ModuleTensors) -> QuantizedLinear:
        """Reads a weight of this group. Raises ModelError as `CheckpointReader.linear`."""
        return self._how.read(module)


class _Floats:
    def __init__(self, weights: Fields) -> None:
        if weights.count("num_bits") != 8:
            raise weights.error("num_bits", "8 for floats")
        strategy = _strategy(weights, "tensor", "channel", "block")
        self._scaled: Literal["row", "tensor"] = "row" if strategy == "channel" else "tensor"
        self._block = block_shape(weights.values.get("block_structure"))
        if strategy != "block":
            self._block = None
        elif self._block is None:
            raise weights.error("block_structure", "two positive integers")

    def read(self, module: ModuleTensors) -> QuantizedLinear:
        """weight float8_e4m3fn [out, in], weight_scale."""
        if module.has(_ZERO_POINT):
            _check_symmetric(module)
        return fp8_linear(module, "weight_scale", self._block, self._scaled)


class _Integers:
    def __init__(self, weights: Fields, in_words: bool, activation_bits: Literal[8, 16]) -> None:
        bits = weights.count("num_bits")
        if bits not in (4, 8):
            raise weights.error("num_bits", "4 or 8")
        self._strategy = _strategy(weights, "tensor", "channel", "group")
        size = weights.count("group_size") if self._strategy == "group" else None
        self._scheme = IntScheme(cast(Literal[4, 8], bits), size, activation_bits=activation_bits)
        self._symmetric = weights.flag("symmetric") if "symmetric" in weights.values else True
        self._minimum = weights.flag("minimum")
        self._weights = weights
        self._in_words = in_words

    def read(self, module: ModuleTensors) -> IntLinear:
        """weight_packed int32 [out, in in words] or weight int8 [out, in]; weight_scale.

        Optionally weight_zero_point, or weight_minimum (see `compressed`). Groups are not contiguous if there is
        weight_g_idx int32 [in], the group of each input, and the config has actorder.
        """
        check_shape(module, self._scheme)
        rows, groups = module.out_features, self._scheme.groups(module.in_features)
        order = self._order(module)
        codes = self._packed_codes(module) if self._in_words else self._codes(module, "weight", module.shape)
        shapes: tuple[tuple[int, ...], ...] = ((rows, groups),)
        if self._strategy != "group":
            shapes = ((rows, 1), (rows,)) if self._strategy == "channel" else ((), (1,), (1, 1))
        scales = module.scales("weight_scale", *shapes)
        zeros = None if self._minimum else self._zeros(module, shapes)
        minima = module.scales("weight_minimum", *shapes) if self._minimum else None
        return int_linear(
            module,
            self._scheme,
            codes if order is None else codes[:, order.long()],
            scales.reshape(-1, groups).expand(rows, groups),
            None if zeros is None else zeros.reshape(-1, groups).expand(rows, groups),
            None if minima is None else minima.reshape(-1, groups).expand(rows, groups),
            order,
        )

    def _order(self, module: ModuleTensors) -> torch.Tensor | None:
        """The inputs sorted by group; None if they are already."""
        # The package initialises it with -1: no order has been found.
        if not module.has(_GROUP_INDEX) or bool((module.raw(_GROUP_INDEX) == -1).all()):
            return None
        order = group_order(module, _GROUP_INDEX, self._scheme)
        said = self._weights.values.get("actorder")
        if order is not None and said is not True and str(said).lower() not in _IN_OTHER_ORDER:
            raise module.error(
                _GROUP_INDEX,
                f"puts inputs in another order, and {self._weights.source}: actorder is {said!r}, "
                "expected 'group', or groups of inputs side by side",
            )
        return order

    def _packed_codes(self, module: ModuleTensors) -> torch.Tensor:
        if module.has("weight_shape"):
            kept = module.take("weight_shape", (torch.int64, torch.int32), (2,))
            if kept.tolist() != list(module.shape):
                raise module.error("weight_shape", f"says {kept.tolist()}, expected {list(module.shape)}")
        words = words_of(module.in_features, self._scheme.bits)
        packed = module.take("weight_packed", (torch.int32,), (module.out_features, words))
        return unpack_words(packed, self._scheme.bits, module.in_features)

    def _codes(self, module: ModuleTensors, part: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """Signed codes, shifted so that the lowest is 0."""
        codes = module.take(part, (torch.int8,), *shapes).to(torch.int16) + self._scheme.middle
        if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) > self._scheme.levels):
            raise module.error(part, f"holds numbers that {self._scheme.bits} bits do not")
        return codes.to(torch.uint8)

    def _zeros(self, module: ModuleTensors, shapes: tuple[tuple[int, ...], ...]) -> torch.Tensor | None:
        """None if the config says symmetric; older files may store the zero points nevertheless."""
        if not self._symmetric:
            return self._kept_zeros(module, shapes)
        if module.has(_ZERO_POINT):
            if not self._in_words or module.raw(_ZERO_POINT).dtype != torch.int32:
                _check_symmetric(module)
            elif bool((self._kept_zeros(module, shapes) != self._scheme.middle).any()):
                raise _not_symmetric(module)
        return None

    def _kept_zeros(self, module: ModuleTensors, shapes: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        part, rows = _ZERO_POINT, module.out_features
        if not self._in_words or self._strategy == "tensor" or module.raw(part).dtype == torch.int8:
            return self._codes(module, part, *shapes)
        groups = self._scheme.groups(module.in_features)
        packed = module.take(part, (torch.int32,), (words_of(rows, self._scheme.bits), groups))
        return unpack_words(packed.T, self._scheme.bits, rows).T


def _check_symmetric(module: ModuleTensors) -> None:
    """Raises ModelError if a zero point, of any dtype, is not 0."""
    if bool(module.raw(_ZERO_POINT).float().any()):
        raise _not_symmetric(module)


def _not_symmetric(module: ModuleTensors) -> ModelError:
    return module.error(_ZERO_POINT, "holds a zero that is not in the middle, though config.json says symmetric")


def _strategy(weights: Fields, *known: str) -> str:
    strategy = weights.values.get("strategy")
    if strategy not in known:
        raise weights.error("strategy", f"one of {', '.join(known)}")
    return str(strategy)


def _activation_bits(fields: Fields) -> Literal[8, 16]:
    """8 if each row is rounded to integers with a scale of its own; else 16, activations are not rounded."""
    rows: Any = fields.values.get("input_activations")
    if rows is not None and not isinstance(rows, dict):
        raise fields.error("input_activations", "an object, or null")
    expected = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    return 8 if rows and {name: rows.get(name, expected[name]) for name in expected} == expected else 16


@dataclass(frozen=True, slots=True)
class Compressed:
    """One weight as it is written.

    Args:
        tensors: by the suffix of names, such as ``weight_scale``.
        group: the entry of ``config_groups``, without its targets.
    """

    tensors: dict[str, torch.Tensor]
    group: dict[str, Any]


def compressed(linear: QuantizedLinear) -> Compressed:
    """Converts a weight in integers or eight-bit floats to the format, bit for bit.

    The format has no field for a scheme's minima: they are in ``weight_minimum`` [out, groups], with ``minimum`` true
    in the group. No other reader supports this.

    Raises:
        CannotQuantize: the format cannot hold its scheme.
    """
    if isinstance(linear, Fp8Linear):
        return _compressed_floats(linear)
    if not isinstance(linear, IntLinear):
        raise CannotQuantize(f"compressed-tensors cannot hold {linear.scheme.name}, expected integers or fp8")
    in_words = linear.scheme.bits == 4 or linear.scheme.group_size is not None
    return _compressed_words(linear) if in_words else _compressed_bytes(linear)


def compressed_config(
    groups: Sequence[tuple[dict[str, Any], Sequence[str]]], left_alone: Sequence[str]
) -> dict[str, Any]:
    """``quantization_config``.

    Args:
        groups: entries of ``config_groups``, see `Compressed.group`, and the modules of each.
        left_alone: names of modules that are plain.
    """
    # As in other tools, a single group targets all linear layers that are not ignored.
    forms = {group["format"] for group, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{index}": {"targets": ["Linear"] if len(groups) == 1 else list(names), **group}
            for index, (group, names) in enumerate(groups)
        },
        "ignore": list(left_alone),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _compressed_words(linear: IntLinear) -> Compressed:
    """weight_packed int32 [out, in in words], weight_zero_point int32 [out in words, groups], unchanged scales."""
    bits, order = linear.scheme.bits, linear.order
    codes = linear.plain_codes()
    if order is not None:
        codes = torch.empty_like(codes).index_copy_(1, order.long(), codes)
    tensors = {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": linear.scales,
        "weight_shape": torch.tensor(linear.shape, dtype=torch.int64),
    }
    if linear.zeros is not None:
        tensors["weight_zero_point"] = pack_words(linear.zeros.T.contiguous(), bits).T.contiguous()
    if linear.minima is not None:
        tensors["weight_minimum"] = linear.minima
    if order is not None:
        of_columns = torch.arange(len(order), dtype=torch.int32) // (len(order) // linear.scales.shape[1])
        tensors["weight_g_idx"] = torch.empty_like(of_columns).index_copy_(0, order.long(), of_columns)
    return Compressed(tensors, _group(linear, PACKED))


def _compressed_bytes(linear: IntLinear) -> Compressed:
    """weight int8 [out, in], weight_scale [out, 1], weight_zero_point int8 [out, 1]."""
    middle = linear.scheme.middle
    tensors = {"weight": _signed(linear.codes, middle), "weight_scale": linear.scales}
    if linear.zeros is not None:
        tensors["weight_zero_point"] = _signed(linear.zeros, middle)
    if linear.minima is not None:
        tensors["weight_minimum"] = linear.minima
    return Compressed(tensors, _group(linear, INTEGERS))


def _signed(codes: torch.Tensor, middle: int) -> torch.Tensor:
    return (codes.to(torch.int16) - middle).to(torch.int8)


def _group(linear: IntLinear, form: str) -> dict[str, Any]:
    scheme = linear.scheme
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.zero == "middle",
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    if scheme.zero == "minimum":
        weights["minimum"] = True
    if linear.order is not None:
        weights["actorder"] = "group"
    rows = None
    if scheme.activation_bits == 8:
        rows = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {"weights": weights, "input_activations": rows, "output_activations": None, "format": form}


def _compressed_floats(linear: Fp8Linear) -> Compressed:
    """weight float8_e4m3fn [out, in], weight_scale [out, 1] or [1]."""
    of_rows = linear.scheme.scaled == "row"
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "channel" if of_rows else "tensor",
        "group_size": None,
        "dynamic": False,
    }
    scales = linear.scales if of_rows else linear.scales.view(1)
    group = {"weights": weights, "input_activations": None, "output_activations": None, "format": FLOATS}
    return Compressed({"weight": linear.codes, "weight_scale": scales}, group)
