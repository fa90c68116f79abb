"""What the formats of integer codes share: words of 32 bits, group sizes, act-order, and the layout served."""

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
    """Packs codes; scales become what `IntLinear` keeps, zeros that are all in the middle are left out.

    Args:
        scheme: its ``zero`` is not looked at.
        codes: uint8 [out, in], groups side by side.
        scales: [out, groups], finite.
        zeros: the codes of zero, uint8 [out, groups]; None: they are in the middle, or there are minima.
        minima: as ``scales``, what code 0 stands for.
        order: int32 [in], see `IntLinear`.

    Raises:
        ModelError: the shape does not fit the scheme, or a scale is or minimum beyond half floats where those are kept.
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
    """Scales or minima in the dtype that `IntLinear` has them in."""
    kept = numbers.to(scheme.scale_dtype).contiguous()
    place = f"{module.store.directory}: {module.name}"
    if not bool(torch.isfinite(kept).all()):
        raise CannotQuantize(f"{place} has a scale beyond the range of half floats")
    if bool(numbers.any()) and not bool(kept.any()):
        raise CannotQuantize(f"{place} has only scales that half floats take for nothing")
    return kept


def check_shape(module: ModuleTensors, scheme: IntScheme) -> None:
    """Raises ModelError where the groups of a scheme do not fit a layer; names it."""
    try:
        scheme.check(*module.shape)
    except CannotQuantize as error:
        raise CannotQuantize(f"{module.store.directory}: {module.name}: {error}") from error


def group_order(module: ModuleTensors, part: str, scheme: IntScheme) -> torch.Tensor | None:
    """The inputs, sorted by the group that a tensor int32 [in] says they are in; None where they are sorted.

    Raises:
        ModelError: a group is not there, or has more or fewer inputs than the others.
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
    """Words that so many codes take."""
    return -(-count * bits // 32)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] to int32 [..., words], filled up with zeros.

    Args:
        bits: 4 or 8.
    """
    padded = functional.pad(codes, (0, -codes.shape[-1] % (32 // bits)))
    return _rows(pack_nibbles(padded) if bits == 4 else padded).view(torch.int32)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of `pack_words`: the first ``count`` codes of each row, uint8 [..., count]."""
    # The bytes of a word lie lowest first on every machine that this runs on.
    packed = _rows(words).view(torch.uint8)
    return (unpack_nibbles(packed) if bits == 4 else packed)[..., :count]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """In memory row after row. What has one column counts as contiguous whatever its strides, so it is copied."""
    return tensor.clone(memory_format=torch.contiguous_format)


def packed_bits(fields: Fields, name: str) -> Literal[4, 8]:
    """Bits of a code. Raises ModelError where they are neither 4 nor 8."""
    if (bits := fields.count(name)) not in (4, 8):
        raise fields.error(name, "4 or 8")
    return cast(Literal[4, 8], bits)


def packed_group_size(fields: Fields, name: str) -> int | None:
    """Inputs that share a scale; None where all do, which is written as -1. Raises ModelError for other numbers."""
    size = fields.values.get(name)
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and size < 1):
        raise fields.error(name, "a positive integer, or -1")
    return None if size == -1 else size
