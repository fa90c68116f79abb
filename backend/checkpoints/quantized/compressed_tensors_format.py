"""What compressed-tensors' files hold of a weight, and what their config says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backend.checkpoints.quantized.words import pack_words
from backend.quantized_weights.errors import CannotQuantize
from backend.quantized_weights.fp8_scheme import Fp8Linear
from backend.quantized_weights.int_scheme import IntLinear
from backend.quantized_weights.quantized_linear import QuantizedLinear

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"


@dataclass(frozen=True, slots=True)
class Compressed:
    """One weight as it is written.

    Args:
        tensors: by the end of their names, such as ``weight_scale``.
        group: the entry of ``config_groups``, without its targets.
    """

    tensors: dict[str, torch.Tensor]
    group: dict[str, Any]


def compressed(linear: QuantizedLinear) -> Compressed:
    """A weight in integers or eight-bit floats as the format keeps it, bit for bit.

    What code 0 stands for, where a scheme keeps that, has no place in the format: it is in ``weight_minimum`` [out,
    groups], with ``minimum`` true in the group, and is read here only.

    Raises:
        CannotQuantize: the format cannot hold its scheme.
    """
    if isinstance(linear, Fp8Linear):
        return _compressed_floats(linear)
    if not isinstance(linear, IntLinear):
        raise CannotQuantize(f"compressed-tensors cannot hold {linear.scheme.name}, expected integers or fp8")
    format_report = linear.scheme.bits == 4 or linear.scheme.group_size is not None
    return _compressed_words(linear) if format_report else _compressed_bytes(linear)


def compressed_config(
    groups: Sequence[tuple[dict[str, Any], Sequence[str]]], left_alone: Sequence[str]
) -> dict[str, Any]:
    """``quantization_config``.

    Args:
        groups: what weights have in common, see `Compressed.group`, and the modules that have it.
        left_alone: names of modules that are plain.
    """
    # One group is all linear layers but those that are ignored, as other tools write it.
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
    """weight_packed int32 [out, in in words], weight_zero_point int32 [out in words, groups], scales as they are."""
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
