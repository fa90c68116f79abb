"""The self-test tells a runner that computes its weights' logits from one that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, StepInput, StepOutput
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.runners.self_test import max_relative_error
from backend.runners.torch.runner import TorchRunner
from tests.backend.engine.test_engine_faults import Around

Small = tuple[ModelConfig, ModelWeights]


class Faulty(Around):
    """A runner with one fault in its inputs or its outputs."""

    def __init__(
        self,
        runner: ModelRunner,
        given: Callable[[StepInput], StepInput] = lambda step: step,
        said: Callable[[StepOutput], None] = lambda output: None,
    ) -> None:
        super().__init__(runner)
        self._given = given
        self._said = said

    def run(self, step: StepInput) -> StepOutput:
        output = self._runner.run(self._given(step))
        with torch.inference_mode():
            self._said(output)
        return output


def one_block_for_all(step: StepInput) -> StepInput:
    return dataclasses.replace(step, block_tables=step.block_tables * 0)


def positions_from_zero(step: StepInput) -> StepInput:
    return dataclasses.replace(step, positions=step.positions % BLOCK_SIZE)


def a_logit_that_is_no_number(output: StepOutput) -> None:
    output.logits[-1, 3] = torch.nan


def a_state_that_is_no_number(output: StepOutput) -> None:
    output.hidden[0, 0] = torch.inf


def test_the_reference_agrees_with_itself(random_llama: Small) -> None:
    """The error of the reference against itself is 0."""
    assert max_relative_error(*random_llama, TorchRunner) == 0


@pytest.mark.parametrize("fault", [one_block_for_all, positions_from_zero])
def test_a_wrong_address_is_far_above_rounding(random_llama: Small, fault: Callable[[StepInput], StepInput]) -> None:
    """Wrong blocks, and wrong positions past the first block, give an error far above rounding."""
    error = max_relative_error(*random_llama, lambda *made: Faulty(TorchRunner(*made), given=fault))
    assert 0.1 < error < float("inf")


@pytest.mark.parametrize("fault", [a_logit_that_is_no_number, a_state_that_is_no_number])
def test_a_nan_output_has_an_infinite_error(random_llama: Small, fault: Callable[[StepOutput], None]) -> None:
    """A single NaN or infinity in logits or states gives an infinite error."""
    assert max_relative_error(*random_llama, lambda *made: Faulty(TorchRunner(*made), said=fault)) == float("inf")
