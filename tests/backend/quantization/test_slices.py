"""Parts of quantised weights are, bit for bit, what the whole has there."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import QuantizedLinear, Scheme
from backend.quantized_weights.slices import rounds_outputs_alone, some_inputs, some_outputs
from tests.backend.quantization.schemes import IDS, SCHEMES

OUTPUTS, INPUTS = 22, 512
ENDS = (0, 128, 384, 512)
"""Of parts of the inputs, in whole groups of every scheme."""


def packed(scheme: Scheme) -> QuantizedLinear:
    """A random weight in a scheme."""
    return scheme.pack(torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
def test_outputs(scheme: Scheme) -> None:
    """Outputs divided at any places make up the whole."""
    linear = packed(scheme)
    parts = [some_outputs(linear, range(*ends)) for ends in itertools.pairwise((0, 1, 9, 22))]
    assert torch.equal(torch.cat([part.unpack() for part in parts]), linear.unpack())
    assert [part.scheme.name for part in parts] == [linear.scheme.name] * 3
    assert parts[1].shape == (8, INPUTS)


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
def test_inputs(scheme: Scheme) -> None:
    """Inputs divided in whole groups make up the whole, unless activations are rounded for all inputs together."""
    linear = packed(scheme)
    parts = [some_inputs(linear, range(*ends), 128) for ends in itertools.pairwise(ENDS)]
    if scheme.activation_bits < 16:
        assert parts == [None] * 3
        return
    found = [part for part in parts if part is not None]
    assert torch.equal(torch.cat([part.unpack() for part in found], dim=1), linear.unpack())
    assert [part.shape for part in found] == [(OUTPUTS, 128), (OUTPUTS, 256), (OUTPUTS, 128)]


@pytest.mark.parametrize(("scheme", "unit"), [(IntScheme(4, 64), 32), (IntScheme(4), 3), (Nf4Scheme(), 96)])
def test_parts_of_groups_are_refused(scheme: Scheme, unit: int) -> None:
    """Inputs are not divided where some part would end within a group, or within a byte."""
    assert some_inputs(packed(scheme), range(2 * unit), unit) is None


def test_inputs_in_another_order_are_not_divided() -> None:
    """A weight in act-order has its outputs divided, with their order, and not its inputs."""
    linear = packed(IntScheme(4, 32))
    assert isinstance(linear, IntLinear)
    ordered = replace(linear, order=torch.randperm(INPUTS).to(torch.int32))
    assert some_inputs(ordered, range(256), 256) is None
    assert torch.equal(some_outputs(ordered, range(3, 9)).unpack(), ordered.unpack()[3:9])


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if rounds_outputs_alone(scheme)], ids=str)
def test_outputs_may_be_rounded_on_their_own(scheme: Scheme) -> None:
    """Of schemes that say so, some outputs are rounded as in the whole weight."""
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5))
    weight[0] *= 40
    assert torch.equal(scheme.pack(weight[3:9]).unpack(), scheme.pack(weight).unpack()[3:9])
