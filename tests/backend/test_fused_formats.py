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
from backend.errors import ModelError
from backend.fused_build import FusedUnavailable
from backend.fused_layout import (
    GROUP,
    KVPrecision,
    Precision,
    as_kept,
    pack_bytes,
    pack_nibbles,
    unpack_bytes,
    unpack_nibbles,
)
from backend.fused_runner import FusedRunner, check_precision
from backend.runner_choice import choose_runner
from backend.torch_runner import TorchRunner
from backend.warm_up import single_sequence_step
from backend.weights import ModelWeights
from tests.backend.conftest import built_library, quiet
from tests.backend.random_models import chunked, random_tokens, relative_error
from tests.backend.test_fused import ENGINE, small

TOKENS = random_tokens(90)
LANES = (8, 16)
FORMATS: list[tuple[Precision, KVPrecision]] = [
    (precision, kv) for precision in ("float16", "int8", "int4") for kv in ("float16", "int8")
]
names = ["-".join(name) for name in FORMATS]


def from_bytes(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """What is left of a matrix after `pack_bytes`."""
    return unpack_bytes(*pack_bytes(weight, lanes))[: weight.shape[0]]


def from_nibbles(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """What is left of a matrix after `pack_nibbles`."""
    return unpack_nibbles(pack_nibbles(weight, lanes)[0], lanes)[: weight.shape[0]]


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


@pytest.mark.parametrize(("precision", "kv"), FORMATS, ids=names)
def test_a_step_computes_what_its_weights_say(
    config: ModelConfig, weights: ModelWeights, precision: Precision, kv: KVPrecision
) -> None:
    """The reference on the same rounded weights differs by the rounding of activations and KV alone."""
    small_config, small_weights = small(config, weights)
    fused = FusedRunner(built_library(), small_config, small_weights, 8, 128, 2, precision, kv)
    reference = TorchRunner(small_config, as_kept(small_weights, precision), 8, 128)
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


@pytest.mark.parametrize(("precision", "kv"), FORMATS, ids=names)
def test_every_format_can_be_asked_for(
    config: ModelConfig, weights: ModelWeights, precision: Precision, kv: KVPrecision
) -> None:
    """It passes its self-test against the reference on the same weights, and says what it is."""
    built_library()
    engine = dataclasses.replace(
        ENGINE,
        quantization="none" if precision == "float16" else precision,
        kv_dtype="int8" if kv == "int8" else "auto",
    )
    runner = choose_runner(*small(config, weights), engine, 128, quiet)
    assert runner.name == f"fused-{precision}" + ("-kv-int8" if kv == "int8" else "")


def test_weights_that_cannot_be_quantised_are_refused(config: ModelConfig, weights: ModelWeights) -> None:
    """Rather than served in a format that nobody asked for."""
    small_config, small_weights = small(config, weights)
    engine = dataclasses.replace(ENGINE, quantization="int4", dtype="float32")
    with pytest.raises(ModelError, match=r"--quantization int4: .*float32"):
        choose_runner(small_config, small_weights, engine, 128, quiet)


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
