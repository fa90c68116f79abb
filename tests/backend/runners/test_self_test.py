"""The self-test tells a runner that computes what its weights say from one that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, StepInput, StepOutput
from backend.model_loader.weights import ModelWeights, load_weights, read_config
from backend.models.config import ModelConfig
from backend.runners.self_test import max_relative_error
from backend.runners.torch.runner import TorchRunner
from tests.backend.engine.test_engine_faults import Around
from tests.backend.random_models import KINDS, save

Small = tuple[ModelConfig, ModelWeights]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    directory: Path = tmp_path_factory.mktemp("llama")
    save(KINDS["llama"], directory)
    config = read_config(directory)
    return config, load_weights(directory, config)


class Faulty(Around):
    """A runner with one fault in what it is given, or in what it says."""

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


def test_the_reference_agrees_with_itself(small: Small) -> None:
    """To the last bit."""
    assert max_relative_error(*small, TorchRunner) == 0


@pytest.mark.parametrize("fault", [one_block_for_all, positions_from_zero])
def test_a_wrong_address_is_far_above_rounding(small: Small, fault: Callable[[StepInput], StepInput]) -> None:
    """Of blocks, and of positions past the first block."""
    error = max_relative_error(*small, lambda *made: Faulty(TorchRunner(*made), given=fault))
    assert 0.1 < error < float("inf")


@pytest.mark.parametrize("fault", [a_logit_that_is_no_number, a_state_that_is_no_number])
def test_what_is_no_number_agrees_with_nothing(small: Small, fault: Callable[[StepOutput], None]) -> None:
    """One is enough: compared with a limit, it would be neither above nor below."""
    assert max_relative_error(*small, lambda *made: Faulty(TorchRunner(*made), said=fault)) == float("inf")
