"""Models that are divided among ranks compute what they compute in one piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.model_loader.source import ModelSource
from tests.backend.random_models import KINDS, Kind, Paged, random_tokens, save, step_of
from tests.backend.runners.parallel.ranks import MOST, Division, continued, many_ranks, one_rank


def odd(name: str, **changes: object) -> Kind:
    """A kind whose vocabulary and inner features divide unevenly."""
    kind = KINDS[name]
    return Kind(kind.family, {**kind.changes, "vocab_size": 307, "intermediate_size": 150, **changes})


DIVISIONS = {
    "biases and an odd vocabulary": Division(odd("llama"), 2, 1),
    "a tied head": Division(odd("llama-3.1"), 2, 1),
    "more ranks than KV heads": Division(odd("llama"), 4, 1),
    "KV heads divided unevenly": Division(odd("qwen3", num_attention_heads=6, num_key_value_heads=3), 2, 1),
    "a mixture of experts in some layers": Division(KINDS["qwen3-moe-mixed"], 2, 1),
    "windows, caps and norms on outputs": Division(KINDS["gemma2"], 2, 1),
    "a tied head in two stages": Division(odd("llama-3.1"), 1, 2),
    "stages of layers that differ": Division(KINDS["gemma3"], 1, 4),
    "two stages of two ranks": Division(odd("mixtral", intermediate_size=150), 2, 2),
}


def run_schedule(runner: ModelRunner) -> torch.Tensor:
    """Logits and states of every row of chunks and decodes, alone and mixed; one step is large enough to be divided."""
    tokens = random_tokens(150)
    first, second, third = (Paged(tokens[own * 50 :], list(range(own * 8, own * 8 + 8))) for own in range(3))
    outputs = []
    for chunks in (
        [(first, 20), (second, 33), (third, 7)],
        [(first, 1), (second, 1), (third, 1)],
        [(third, 2 * BLOCK_SIZE), (second, 1), (first, 3)],
        [(second, 5)],
    ):
        output = runner.run(step_of(chunks))
        outputs.append(torch.cat([output.logits, output.hidden], dim=1))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", DIVISIONS)
def test_logits_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    """Logits and hidden states are within 1e-4 of one device's in any schedule, and greedy answers are the same."""
    division = DIVISIONS[name]
    save(division.kind, tmp_path)
    one = one_rank(tmp_path)
    with many_ranks(tmp_path, division.tensor, division.stages) as many:
        expected, got = run_schedule(one), run_schedule(many)
        assert float(expected.abs().max()) > 1
        assert float((got - expected).abs().max()) < MOST
        prompt = random_tokens(30, seed=7)
        assert continued(many, prompt, 24) == continued(one, prompt, 24)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bundled_model_is_divided(ranks: int, source: ModelSource) -> None:
    """SmolLM2 with its 3 KV heads computes the same on two ranks, unevenly divided, as on three."""
    one = one_rank(source.directory)
    prompt = random_tokens(40)
    with many_ranks(source.directory, ranks) as many:
        step = [(Paged(prompt, [3, 1, 2]), 40)]
        expected = one.run(step_of(step)).logits.clone()
        step = [(Paged(prompt, [3, 1, 2]), 40)]
        assert float((many.run(step_of(step)).logits - expected).abs().max()) < MOST
        assert continued(many, prompt, 8) == continued(one, prompt, 8)
