"""Ranks with the kernels for devices compute what one device does; here the kernels are interpreted, and gloo connects.

What NCCL does among devices is tested in tests/gpu.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from backend.engine.model_runner import ModelRunner
from tests.backend.random_models import KINDS, Kind, Paged, random_tokens, save, step_of
from tests.backend.runners.parallel.ranks import INTERPRETED, continued, many_ranks, one_device

MOST = 1e-4
"""Largest difference of a logit in float32."""


@dataclass(frozen=True)
class Division:
    """A kind of model, and on how many ranks it is computed."""

    kind: Kind
    tensor: int
    stages: int


def small(name: str, **changes: object) -> Kind:
    """A kind with heads of a size that there are kernels for, and with sizes that divide unevenly."""
    sizes = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 307, "intermediate_size": 150}
    return Kind(KINDS[name].family, {**KINDS[name].changes, **sizes, **changes})


DIVISIONS = {
    "biases and an odd vocabulary": Division(small("llama"), 2, 1),
    "a tied head, and ranks with the same KV head": Division(small("qwen3", num_key_value_heads=1), 2, 1),
    "two stages of two ranks": Division(small("llama", num_hidden_layers=3), 2, 2),
    "a tied head and windows in two stages": Division(small("qwen3-windowed", num_hidden_layers=4), 1, 2),
}


def run_schedule(runner: ModelRunner) -> torch.Tensor:
    """Logits and states of every row of chunks and decodes, alone and mixed; the first step is divided among stages."""
    tokens = random_tokens(100)
    first, second = (Paged(tokens[own * 50 :], list(range(own * 8, own * 8 + 8))) for own in range(2))
    outputs = []
    for chunks in ([(first, 20), (second, 33)], [(first, 1), (second, 1)], [(first, 17), (second, 1)]):
        output = runner.run(step_of(chunks))
        outputs.append(torch.cat([output.logits, output.hidden], dim=1))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", DIVISIONS)
def test_logits_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    """Logits and hidden states are within 1e-4 of one device's in any schedule, and greedy answers are the same."""
    division = DIVISIONS[name]
    save(division.kind, tmp_path)
    one = one_device(tmp_path)
    with many_ranks(tmp_path, division.tensor, division.stages, devices=INTERPRETED) as many:
        expected, got = run_schedule(one), run_schedule(many)
        assert float(expected.abs().max()) > 1
        assert float((got - expected).abs().max()) < MOST
        prompt = random_tokens(20, seed=7)
        assert continued(many, prompt, 8) == continued(one, prompt, 8)
