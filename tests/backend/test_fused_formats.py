"""Integer weights and integer KV of the fused step: what they lose, and what they never change."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.config import ModelConfig
from backend.fused_build import FusedUnavailable
from backend.fused_layout import GROUP, KVPrecision, Precision, pack_bytes, pack_nibbles
from backend.fused_runner import FusedRunner, check_precision
from backend.torch_runner import TorchRunner
from backend.warm_up import single_sequence_step
from backend.weights import LayerWeights, Linear, ModelWeights
from tests.backend.conftest import built_library
from tests.backend.test_fused import small
from tests.backend.test_parity import TOKENS, chunked, relative_error

LANES = (8, 16)
FORMATS: list[tuple[Precision, KVPrecision]] = [
    (precision, kv) for precision in ("float16", "int8", "int4") for kv in ("float16", "int8")
]
names = ["-".join(name) for name in FORMATS]


def from_bytes(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """What is left of a matrix after `pack_bytes`, and each weight's scale."""
    panels, scales = pack_bytes(weight, lanes)
    columns = panels.transpose(1, 2).reshape(-1, weight.shape[1])
    return ((columns.float() - 128) * scales.unsqueeze(1))[: weight.shape[0]]


def from_nibbles(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """What is left of a matrix after `pack_nibbles`."""
    packed, _ = pack_nibbles(weight, lanes)
    columns, groups = 2 * lanes, weight.shape[1] // GROUP
    size = GROUP // 2 * columns
    both = packed[..., :size].view(-1, groups, 2, GROUP // 8, lanes, 4)
    words = torch.cat((both & 15, both >> 4), dim=3).permute(0, 2, 4, 1, 3, 5)
    nibbles = words.reshape(-1, groups, GROUP).float()
    numbers = packed[..., size:].contiguous().view(torch.float16).view(-1, groups, 2, columns).permute(2, 0, 3, 1)
    scales, minima = numbers.reshape(2, -1, groups, 1).float()
    return (nibbles * scales + minima).flatten(1)[: weight.shape[0]]


matrices = st.builds(
    lambda out, groups, seed, spread: (
        torch.randn(out, groups * GROUP, generator=torch.Generator().manual_seed(seed)) * spread
    ),
    st.integers(1, 70),
    st.integers(1, 4),
    st.integers(0, 2**31),
    st.sampled_from([1e-3, 0.05, 1.0, 30.0]),
)


@settings(max_examples=40, deadline=None)
@given(weight=matrices, lanes=st.sampled_from(LANES))
def test_int8_is_within_half_a_scale(weight: torch.Tensor, lanes: int) -> None:
    """Of every column's own."""
    half = weight.abs().amax(dim=1, keepdim=True) / 127 / 2
    assert bool(((from_bytes(weight, lanes) - weight).abs() <= half * 1.0001 + 1e-12).all())


@settings(max_examples=40, deadline=None)
@given(weight=matrices, lanes=st.sampled_from(LANES))
def test_int4_is_within_half_a_scale(weight: torch.Tensor, lanes: int) -> None:
    """Of every group's own, give or take the rounding of scale and minimum to half floats."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    bound = (high - low) / 15 * 0.5 + (high - low) * 1e-3 + low.abs() * 1e-3 + 1e-6
    error = (from_nibbles(weight, lanes) - weight).abs().view_as(groups)
    assert bool((error <= bound.unsqueeze(-1)).all())


def test_constant_weights_stay_what_they_are() -> None:
    """Zeros, and groups of one value, need no scale."""
    weight = torch.zeros(3, 2 * GROUP)
    weight[1] = 0.5
    assert torch.equal(from_bytes(weight, 8), weight)
    assert torch.equal(from_nibbles(weight, 8), weight)


def rounded(weights: ModelWeights, precision: Precision) -> ModelWeights:
    """The weights as a format keeps them, in floats again."""
    keep = {"float16": lambda w, _: w.half().float(), "int8": from_bytes, "int4": from_nibbles}[precision]

    def linear(part: Linear) -> Linear:
        return dataclasses.replace(part, weight=keep(part.weight.float(), 8))

    def layer(of: LayerWeights) -> LayerWeights:
        parts = {f.name: getattr(of, f.name) for f in dataclasses.fields(of)}
        return dataclasses.replace(of, **{name: linear(p) for name, p in parts.items() if isinstance(p, Linear)})

    head = from_bytes(weights.head.float(), 8) if precision != "float16" else weights.head
    return dataclasses.replace(weights, layers=[layer(of) for of in weights.layers], head=head)


@pytest.mark.parametrize(("precision", "kv"), FORMATS, ids=names)
def test_a_step_computes_what_its_weights_say(
    config: ModelConfig, weights: ModelWeights, precision: Precision, kv: KVPrecision
) -> None:
    """The reference on the same rounded weights differs by the rounding of activations and KV alone."""
    small_config, small_weights = small(config, weights)
    fused = FusedRunner(built_library(), small_config, small_weights, 8, 128, 2, precision, kv)
    reference = TorchRunner(small_config, rounded(small_weights, precision), 8, 128)
    allowed = (0.001 if precision == "float16" else 0.02) + (0.02 if kv == "int8" else 0)
    assert relative_error(chunked(fused, TOKENS, 90), chunked(reference, TOKENS, 90)) < allowed


@pytest.mark.parametrize(("precision", "kv"), FORMATS, ids=names)
def test_neither_chunks_nor_threads_change_a_bit(
    config: ModelConfig, weights: ModelWeights, precision: Precision, kv: KVPrecision
) -> None:
    """The promise of the fused step holds in every format, whatever the number of rows that share a kernel."""
    library, some = built_library(), small(config, weights)
    runs = [
        chunked(FusedRunner(library, *some, 8, 128, threads, precision, kv), TOKENS, *sizes)
        for threads, sizes in ((1, [90]), (3, [90]), (2, [1, 2, 3, 4, 5, 6, 7, 8, 13, 41]), (2, [17] + [1] * 73))
    ]
    for one, other in itertools.pairwise(runs):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("precision", "kv"), FORMATS, ids=names)
def test_what_is_no_number_stays_none(
    config: ModelConfig, weights: ModelWeights, precision: Precision, kv: KVPrecision
) -> None:
    """A row that has gone wrong shows in its logits, rather than being rounded to something plausible."""
    small_config, small_weights = small(config, weights)
    embedding = small_weights.embedding.clone()
    embedding[7, 3] = float("nan")
    broken = dataclasses.replace(small_weights, embedding=embedding, head=small_weights.head)
    runner = FusedRunner(built_library(), small_config, broken, 8, 128, 2, precision, kv)
    logits = runner.run(single_sequence_step(np.array([5, 6, 7, 8], dtype=np.int32), 0)).logits
    assert torch.isfinite(logits[:2]).all()
    assert torch.isnan(logits[2:]).any(dim=-1).all()


def test_integer_kv_takes_a_little_more_than_half(config: ModelConfig) -> None:
    """A byte for each number, and a scale for each token and head."""
    ratio = FusedRunner.block_bytes(config, "int8") / FusedRunner.block_bytes(config)
    assert ratio == pytest.approx(0.5 + 4 / (2 * config.head_dim))


def test_widths_that_groups_do_not_divide(config: ModelConfig) -> None:
    """Are named, and floats take them all the same."""
    odd = dataclasses.replace(config, intermediate_size=1530)
    check_precision(odd, "float16")
    with pytest.raises(FusedUnavailable, match="1530"):
        check_precision(odd, "int4")
