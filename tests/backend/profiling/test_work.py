"""Bytes and operations of steps, calculated by hand."""

from __future__ import annotations

import dataclasses

import pytest

from backend.models.config import Experts
from backend.models.sizes import count_parameters
from backend.profiling.attribution import Part
from backend.profiling.bottleneck import named, roofs_of
from backend.profiling.instrumentation import Kind, StepRecord
from backend.profiling.machine import Machine
from backend.profiling.work import ModelWork
from tests.backend.tiny_model import CONFIG

LAYERS = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 160)
HEAD = 160 * 128
KV = 2 * 2 * 64 * 2
"""Bytes of a token's keys and values, in half floats."""
MACHINE = Machine("CPU", 1, bytes_per_second=1e9, flops_per_second=1e11, dtype="float32", buffer_bytes=0)


def step(kind: Kind, *chunks: tuple[int, int], took: float = 0.0, model: float = 0.0, logits: int = 1) -> StepRecord:
    rows = 0 if kind == "decode" else sum(count for _, count in chunks)
    return StepRecord(kind, chunks, rows, logits, 0, 0.0, model or took, took)


def work(read_bytes: int = 2 * (LAYERS + HEAD)) -> ModelWork:
    return ModelWork(CONFIG, read_bytes, KV)


def test_a_decode_step_reads_weights_once_and_each_context() -> None:
    """Two sequences share the weights, and each reads its own keys and values."""
    its = work().of(step("decode", (9, 1), (99, 1), logits=2))
    assert its.weight_bytes == 2 * (LAYERS + HEAD)
    assert its.kv_bytes == KV * (10 + 100 + 2)
    attention = 4 * CONFIG.num_heads * CONFIG.head_dim * CONFIG.num_layers * (10 + 100)
    assert its.flops == 2 * LAYERS * 2 + 2 * HEAD * 2 + attention


def test_a_prefill_computes_all_rows_and_one_row_of_logits() -> None:
    """Its rows attend to all before them: 5 + 6 + 7 + 8 positions."""
    its = work().of(step("prefill", (4, 4)))
    assert its.flops == 2 * LAYERS * 4 + 2 * HEAD + 4 * 2 * 64 * 2 * (5 + 6 + 7 + 8)
    assert its.kv_bytes == KV * (8 + 4)


def test_a_window_bounds_what_is_read() -> None:
    """A layer with a window of 16 tokens reads no more of a context of 100."""
    windowed = ModelWork(dataclasses.replace(CONFIG, windows=(16, None)), 1000, KV)
    its = windowed.of(step("decode", (99, 1)))
    assert its.kv_bytes == KV * ((16 + 100) / 2 + 1)


def test_experts_that_no_row_chooses_are_not_read() -> None:
    """One row reads two of eight experts; many rows read all of them."""
    config = dataclasses.replace(CONFIG, experts=Experts(8, 2, 160, True))
    parameters = count_parameters(config)
    whole = 2 * (parameters.layers + parameters.embedding)
    mixture = ModelWork(config, whole, KV)
    unread = 2 * 2 * 6 * (3 * 128 * 160)
    assert mixture.of(step("decode", (9, 1))).weight_bytes == pytest.approx(whole - unread)
    assert mixture.of(step("prefill", (0, 200))).weight_bytes == pytest.approx(whole)
    assert mixture.flops_per_token == 2 * (parameters.layers - unread // 2)


@pytest.mark.parametrize(
    ("took", "model", "said"),
    [
        (
            0.60,
            0.59,
            "decode: memory bandwidth: 500 MB of weights and 0.1 MB of keys and values per step / 1.0 GB/s = 500 ms of "
            "the 600 ms step",
        ),
        (2.0, 0.55, "decode: Python: 1450 ms of Python and sampling around the model of the 2000 ms step"),
        (3.0, 2.9, "decode: neither memory bandwidth (500 ms), arithmetic"),
    ],
)
def test_a_decode_step_is_bound_by_what_takes_most_of_it(took: float, model: float, said: str) -> None:
    """Memory, where its bytes take most of the time; Python, where the model waits for it; else nobody knows."""
    roofs = roofs_of([step("decode", (200, 1), took=took, model=model)], work(500_000_000), MACHINE)
    assert roofs[0].sentence.startswith(said), roofs[0].sentence


def test_the_part_that_takes_most_is_named_with_its_calculation() -> None:
    """A part of the model with what bounds it, another part with what it means."""
    roofs = roofs_of([step("prefill", (0, 4000), took=0.05, model=0.05)], work(1_000_000), MACHINE)
    mostly_prefill = named([Part("prefill", "", 3, 0), Part("idle", "", 1, 0)], roofs)
    assert mostly_prefill.startswith("75% of the time goes into prefill steps. prefill: arithmetic: 4000 tokens of")
    idle = named([Part("prefill", "", 1, 0), Part("idle", "", 3, 0)], roofs)
    assert idle == "75% of the time is idle: the engine has nothing to do: more requests at a time would use it"
