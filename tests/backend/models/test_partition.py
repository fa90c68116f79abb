"""How a model is divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.errors import ModelError
from backend.models.config import Experts
from backend.models.partition import ModelPart, common_units, partition
from tests.backend.tiny_model import CONFIG

SMOLLM2 = replace(
    CONFIG, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3
)


def joined(parts: Iterable[ModelPart], of: Callable[[ModelPart], range]) -> list[int]:
    return [number for part in parts for number in of(part)]


@given(
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 4),
    layers=st.integers(1, 9),
    inner=st.sampled_from([96, 150, 257, 1536]),
    vocabulary=st.integers(40, 50),
    experts=st.booleans(),
    tensor=st.integers(1, 9),
    stages=st.integers(1, 10),
)
def test_every_part_of_a_model_is_computed_once(
    kv_heads: int, group: int, layers: int, inner: int, vocabulary: int, experts: bool, tensor: int, stages: int
) -> None:
    """Layers, heads, inner features and vocabulary are divided without gap or overlap, or the ranks are refused."""
    config = replace(
        CONFIG,
        vocab_size=vocabulary,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        experts=Experts(4, 2, 24, True) if experts else None,
    )
    try:
        parts = partition(config, tensor, stages)
    except ModelError:
        assert stages > layers or tensor > kv_heads
        return
    assert [part.rank for part in parts] == list(range(tensor * stages))
    assert joined([part for part in parts if part.tensor_rank == 0], lambda part: part.layers) == list(range(layers))
    for stage in range(stages):
        own = [part for part in parts if part.stage == stage]
        assert joined(own, lambda part: part.heads) == list(range(kv_heads * group))
        assert joined(own, lambda part: part.intermediate) == list(range(inner))
        assert joined(own, lambda part: part.expert_intermediate) == list(range(24 if experts else 0))
        assert joined(own, lambda part: part.vocabulary) == list(range(vocabulary))
        for part in own:
            assert min(map(len, (part.heads, part.intermediate, part.vocabulary, part.layers))) > 0
            # Each head has its KV head, and all KV heads of a rank have as many heads.
            assert {head // group for head in part.heads} == set(part.kv_heads)
            assert len(part.heads) % len(part.kv_heads) == 0
            units = common_units(config, tensor)
            assert part.intermediate.start % units.intermediate == part.intermediate.stop % units.intermediate == 0


def test_ranks_with_fewer_heads_have_more_of_the_mlp() -> None:
    """SmolLM2 on two ranks: 3 and 6 heads, and weights that differ by less than a tenth."""
    first, second = partition(SMOLLM2, 2, 1)
    assert (len(first.heads), len(second.heads)) == (3, 6)
    sizes = [2 * 64 * (len(part.heads) + len(part.kv_heads)) + 3 * len(part.intermediate) for part in (first, second)]
    assert max(sizes) < 1.1 * min(sizes)


def test_the_last_stage_has_fewer_layers_for_its_head() -> None:
    """SmolLM2's head has as many weights as eight layers, so the second of two stages has fewer layers."""
    first, second = partition(SMOLLM2, 1, 2)
    assert len(first.layers) > len(second.layers) + 4


@pytest.mark.parametrize(
    ("tensor", "stages", "message"),
    [
        (10, 1, r"--tensor-parallel 10: .* 3 KV heads with 3 heads each, .* expected at most 9"),
        (1, 31, r"--pipeline-parallel 31: this model has 30 layers, expected at most as many stages"),
    ],
)
def test_too_many_ranks_are_refused(tensor: int, stages: int, message: str) -> None:
    """The message names the option and what would be right."""
    with pytest.raises(ModelError, match=message):
        partition(SMOLLM2, tensor, stages)
