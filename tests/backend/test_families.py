"""Every family of decoder computes what transformers computes, however its tokens are spread over steps and blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend.torch_runner import TorchRunner
from backend.weights import load_weights, read_config
from tests.backend.random_models import KINDS, Paged, random_tokens, relative_error, save, step_of

LENGTHS = (83, 70, 30)
"""The first two are several windows long, the last is about one."""


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, TorchRunner]:
    """transformers' model, and ours as loaded from the files that transformers wrote."""
    reference = save(KINDS[request.param], tmp_path)
    config = read_config(tmp_path)
    return reference, TorchRunner(config, load_weights(tmp_path, config), num_blocks=24, max_context=128)


def shuffled_sequences() -> list[Paged]:
    """Sequences of ``LENGTHS`` whose blocks lie anywhere."""
    blocks = np.random.default_rng(5).permutation(24).tolist()
    return [Paged(random_tokens(length, seed), blocks[6 * seed : 6 * seed + 6]) for seed, length in enumerate(LENGTHS)]


def test_logits_and_states_agree_with_transformers(pair: tuple[Any, TorchRunner]) -> None:
    """Prefill, chunks beside decodes of others, and batches of decodes: float32 logits and states within 1e-4."""
    reference, runner = pair
    sequences = shuffled_sequences()
    first, second, third = sequences
    logits: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    states: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    schedule = [
        [(first, 60)],  # whole prompt, longer than the window
        [(second, 17), (first, 1)],
        [(second, 33), (third, 5), (first, 1)],
        [(first, 2), (second, 1), (third, 19)],
        *[[(first, 1), (second, 1), (third, 1)]] * 6,  # decodes of sequences of three lengths
        [(first, 13), (second, 13)],
    ]
    for chunks in schedule:
        step = step_of(chunks)
        output = runner.run(step)
        counts = [count for _, count in chunks]
        for (sequence, _), rows, hidden in zip(
            chunks, torch.split(output.logits, counts), torch.split(output.hidden, counts), strict=True
        ):
            logits[id(sequence)].append(rows.clone())
            states[id(sequence)].append(hidden.clone())
    for sequence in sequences:
        assert sequence.computed == len(sequence.tokens)
        with torch.inference_mode():
            expected = reference(torch.from_numpy(sequence.tokens).long()[None], output_hidden_states=True)
        assert relative_error(torch.cat(logits[id(sequence)]), expected.logits[0]) < 1e-4
        assert relative_error(torch.cat(states[id(sequence)]), expected.hidden_states[-1][0]) < 1e-4
