"""The CUDA runner on the CPU with interpreted kernels, against the reference runner."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend.runners.cuda.decoder import check_model
from backend.runners.cuda.runner import CudaRunner
from backend.runners.errors import RunnerUnavailable
from backend.runners.torch.runner import TorchRunner
from tests.backend.runners.cuda.random_model import CONFIG, STEPS, VARIANTS, random_weights
from tests.backend.runners.cuda.references import relative_error


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_hidden_states_agree_with_the_reference(variant: str) -> None:
    """Logits and hidden states match the reference over prefill, chunks, mixed steps and decode."""
    config = VARIANTS[variant]
    weights = random_weights(config)
    runner = CudaRunner(config, weights, 8, 64, 4, torch.float32, "cpu")
    reference = TorchRunner(config, weights, 8, 64)
    # The first is the one that shows every kind of step; the others differ from it in every kind.
    for step in STEPS if variant == "llama" else STEPS[:3]:
        got, expected = runner.run(step), reference.run(step)
        assert relative_error(got.logits, expected.logits) < 1e-5
        assert got.hidden.shape == expected.hidden.shape
        assert not len(step.hidden_rows) or relative_error(got.hidden, expected.hidden) < 1e-5


def test_half_floats_stay_close() -> None:
    """Logits in float16, the half precision that the interpreter multiplies, stay close to the reference."""
    weights = random_weights(CONFIG)
    runner = CudaRunner(CONFIG, weights, 8, 64, 4, torch.float16, "cpu")
    reference = TorchRunner(CONFIG, weights, 8, 64)
    for step in STEPS[:1]:
        assert relative_error(runner.run(step).logits, reference.run(step).logits) < 5e-3


def test_models_without_kernels_are_refused_with_every_reason() -> None:
    """A model that the kernels do not cover is refused with every reason at once."""
    other = dataclasses.replace(CONFIG, activation="gelu_tanh", output_norms=True, head_dim=72)
    with pytest.raises(RunnerUnavailable, match=r"gelu_tanh activation, norms on the outputs .*, a head_dim of 72"):
        check_model(other)
