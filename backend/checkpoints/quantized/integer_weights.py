"""Shared by the formats of integer codes: words of 32 bits, group sizes, act-order, and the layout served."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch.nn import functional

from backend.checkpoints.module_tensors import ModuleTensors
from backend.models.json_fields import Fields
from backend.quantized_weights.int_scheme import IntLinear, IntScheme, Zero, pack_nibbles, unpack_nibbles
from backend.quantized_weights.quantized_linear import CannotQuantize


def int_linear(
    module: ModuleTensors,
    scheme: IntScheme,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    minima: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> IntLinear:
    """Packs codes and converts scales to `IntLinear`'s dtype; drops zeros that are all in the middle.

    Args:
        scheme: its ``zero`` is ignored.
        codes: uint8 [out, in], groups contiguous.
        scales: [out, groups], finite.
        zeros: the codes of zero, uint8 [out, groups]; None: they are in the middle, or there are minima.
        minima: as ``scales``, the values of code 0.
        order: int32 [in], see `IntLinear`.

    Raises:
        ModelError: the shape does not fit the scheme, or a scale or minimum is beyond half floats if it becomes one.
    """
    if zeros is not None and bool((zeros == scheme.middle).all()):
        zeros = None
    zero: Zero = "integer" if zeros is not None else "middle" if minima is None else "minimum"
    scheme = IntScheme(scheme.bits, scheme.group_size, zero, scheme.activation_bits)
    check_shape(module, scheme)
    return IntLinear(
        scheme,
        pack_nibbles(codes) if scheme.bits == 4 else codes.contiguous(),
        _kept(module, scheme, scales),
        None if zeros is None else zeros.contiguous(),
        None if minima is None else _kept(module, scheme, minima),
        order,
    )


def _kept(module: ModuleTensors, scheme: IntScheme, numbers: torch.Tensor) -> torch.Tensor:
    """Scales or minima in the dtype of `IntLinear`."""
    kept = numbers.to(scheme.scale_dtype).contiguous()
    place = f"{module.store.directory}: {module.name}"
    if not bool(torch.isfinite(kept).all()):
        raise CannotQuantize(f"{place} has a scale beyond the range of half floats")
    if bool(numbers.any()) and not bool(kept.any()):
        raise CannotQuantize(f"{place} has only scales that half floats take for nothing")
    return kept


def check_shape(module: ModuleTensors, scheme: IntScheme) -> None:
    """Raises ModelError if the groups of a scheme do not fit a layer; names it."""
    try:
        scheme.check(*module.shape)
    except CannotQuantize as error:
        raise CannotQuantize(f"{module.store.directory}: {module.name}: {error}") from error


def group_order(module: ModuleTensors, part: str, scheme: IntScheme) -> torch.Tensor | None:
    """The inputs, sorted by the group that a tensor int32 [in] gives for each; None if they are sorted.

    Raises:
        ModelError: a group does not exist, or has more or fewer inputs than the others.
    """
    check_shape(module, scheme)
    of_inputs = module.take(part, (torch.int32,), (module.in_features,))
    groups = scheme.groups(module.in_features)
    size = module.in_features // groups
    lowest, highest = int(of_inputs.min()), int(of_inputs.max())
    if lowest < 0 or highest >= groups:
        wrong = lowest if lowest < 0 else highest
        raise module.error(part, f"names group {wrong}, expected 0 to {groups - 1}")
    sizes = torch.bincount(of_inputs, minlength=groups)
    if not bool((sizes == size).all()):
        group = int((sizes != size).nonzero()[0])
        raise module.error(part, f"gives group {group} {int(sizes[group])} inputs, expected {size}")
    order = torch.argsort(of_inputs, stable=True).to(torch.int32)
    return None if bool((order[1:] > order[:-1]).all()) else order


def words_of(count: int, bits: int) -> int:
    """Words of ``count`` codes."""
    return -(-count * bits // 32)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] to int32 [..., words], padded with zeros.

    Args:
        bits: 4 or 8.
    """
    padded = functional.pad(codes, (0, -codes.shape[-1] % (32 // bits)))
    return _rows(pack_nibbles(padded) if bits == 4 else padded).view(torch.int32)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of `pack_words`: the first ``count`` codes of each row, uint8 [..., count]."""
    # All supported machines are little-endian.
    packed = _rows(words).view(torch.uint8)
    return (unpack_nibbles(packed) if bits == 4 else packed)[..., :count]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A row-major copy. One column counts as contiguous with any strides, so ``contiguous`` does not suffice."""
    return tensor.clone(memory_format=torch.contiguous_format)


def packed_bits(fields: Fields, name: str) -> Literal[4, 8]:
    """Bits of a code. Raises ModelError if they are neither 4 nor 8."""
    if (bits := fields.count(name)) not in (4, 8):
        raise fields.error(name, "4 or 8")
    return cast(Literal[4, 8], bits)


def packed_group_size(fields: Fields, name: str) -> int | None:
    """Inputs that share a scale; None if all do, which is written as -1. Raises ModelError for other numbers."""
    size = fields.values.get(name)
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and size < 1):
        raise fields.error(name, "a positive integer, or -1")
    return None if size == -1 else size
