"""A model's weights in every scheme with a layout of the fused step, and in mixtures of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch

from backend.model_loader.linears import Weight, map_linears
from backend.model_loader.weights import ModelWeights, dense
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import Scheme

INT8 = IntScheme(8)
INT8_HEAD = IntScheme(8, 64)


def reordered(weight: torch.Tensor, scheme: IntScheme, seed: int) -> IntLinear:
    """Rounded in groups of inputs that are neighbours in a random order, as GPTQ's act-order makes them."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    columns = weight[:, order]
    grid = scheme.grid(columns)
    return IntLinear.of(scheme, grid.encode(columns), grid, order.to(torch.int32))


def _all(*schemes: Scheme) -> Callable[[str, torch.Tensor], Weight]:
    """Each weight in the first of some schemes whose groups divide its inputs."""

    def pack(_: str, weight: torch.Tensor) -> Weight:
        fits = next(scheme for scheme in schemes if weight.shape[1] % _group(scheme) == 0)
        return fits.pack(weight)

    return pack


def _group(scheme: Scheme) -> int:
    match scheme:
        case IntScheme():
            return scheme.group_size or 1
        case Nf4Scheme():
            return scheme.block_size
    return 1


def _mixed(name: str, weight: torch.Tensor) -> Weight:
    """Different schemes for the parts of one matrix."""
    schemes: dict[str, Scheme] = {
        "q_proj": IntScheme(4, 64),
        "k_proj": INT8,
        "v_proj": Nf4Scheme(),
        "gate_proj": IntScheme(4, 32, "minimum"),
        "up_proj": Fp8Scheme(),
        "down_proj": INT8,
    }
    scheme = schemes.get(name.rpartition(".")[2])
    return weight if scheme is None else scheme.pack(weight)


def _in_order(name: str, weight: torch.Tensor) -> Weight:
    """Input orders that the parts of one matrix share, or that one of them cannot have."""
    layer, _, part = name.rpartition(".")
    if part == "k_proj":
        return INT8.pack(weight)
    if part == "v_proj":
        return IntScheme(4, 32).pack(weight)
    return reordered(weight, IntScheme(4, 32, "integer"), zlib.crc32(layer.encode()))


_SCHEMES: dict[str, tuple[Callable[[str, torch.Tensor], Weight], Scheme | None]] = {
    "float16": (lambda _, weight: weight, None),
    "bfloat16": (lambda _, weight: weight.to(torch.bfloat16), None),
    "int8": (_all(INT8), INT8_HEAD),
    "int4": (_all(IntScheme(4, 32, "minimum")), INT8_HEAD),
    "int4-g64": (_all(IntScheme(4, 64), IntScheme(4, 32)), INT8_HEAD),
    "int4-asym-g128": (_all(IntScheme(4, 128, "integer"), IntScheme(4, 32, "integer")), None),
    "fp8": (_all(Fp8Scheme()), INT8_HEAD),
    "fp8-tensor": (_all(Fp8Scheme("tensor")), Fp8Scheme()),
    "nf4": (_all(Nf4Scheme(), Nf4Scheme(32)), INT8_HEAD),
    "nf4-single-b128": (_all(Nf4Scheme(128, double=False), Nf4Scheme(32, double=False)), Nf4Scheme()),
    "int8-g32": (_all(IntScheme(8, 32)), None),
    "int8-asym-g32": (_all(IntScheme(8, 32, "integer")), None),
    "mixed": (_mixed, INT8),
    "act-order": (_in_order, INT8),
}
NAMES = tuple(_SCHEMES)


def kept(weights: ModelWeights, name: str) -> ModelWeights:
    """The same model with its weights in a scheme of ``NAMES``."""
    pack, head = _SCHEMES[name]
    packed = map_linears(weights, lambda at, weight: pack(at, dense(weight)))
    return packed if head is None else replace(packed, head=head.pack(dense(weights.head)))
