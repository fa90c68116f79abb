"""A sequence of a fully windowed model holds the blocks of its window and generates the same text as with all."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, StepInput, StepOutput
from backend.engine.sequence import FinishReason
from backend.model import ServedModel, load_model
from backend.model_loader.source import ModelSource
from backend.model_loader.weights import load_weights, read_config
from backend.models.config import ModelConfig
from backend.responses.model_info import describe
from backend.runners.torch.runner import TorchRunner
from tests.backend.engine.test_engine_faults import Around
from tests.backend.models.test_config import read
from tests.backend.random_models import KINDS, WINDOW, Kind, random_tokens, save
from tests.backend.tiny_model import EngineClient

NUM_BLOCKS = 16
LONGEST = 160
STEP = 20
"""Most tokens of a step in these tests."""
WINDOWED = ("mistral", "gemma2")
"""All layers, and every second one."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """transformers' model and ours, with the same random weights."""

    reference: Any
    runner: ModelRunner
    small: ModelRunner
    """With memory for 80 tokens."""


@pytest.fixture(scope="module", params=WINDOWED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory: Path = tmp_path_factory.mktemp(request.param)
    kind = KINDS[request.param]
    reference = save(Kind(kind.family, {**kind.changes, "num_hidden_layers": 2}), directory)
    config = dataclasses.replace(read_config(directory), eos_token_ids=())
    weights = load_weights(directory, config)
    runner, small = (TorchRunner(config, weights, blocks, 256) for blocks in (NUM_BLOCKS, 5))
    return Pair(reference, runner, small)


PROMPTS = st.builds(
    lambda family, common, tail: [*random_tokens(common, family).tolist(), *tail],
    st.integers(0, 1),
    st.sampled_from([0, 16, 33, 64, 100]),
    st.lists(st.integers(10, 12), min_size=1, max_size=20),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(st.tuples(PROMPTS, st.integers(1, 40), st.integers(0, 1)), min_size=1, max_size=6),
    max_batch=st.integers(1, 4),
    step_tokens=st.integers(1, STEP),
    stagger=st.integers(0, 4),
)
def test_answers_past_the_window_are_those_of_transformers(
    requests: list[tuple[list[int], int, int]], max_batch: int, step_tokens: int, stagger: int, pair: Pair
) -> None:
    """Each token past the window is the most likely one in transformers, with hits, preemption and chunks."""
    client = EngineClient(Engine(pair.runner, max_batch, step_tokens))
    for number, (prompt, answer, priority) in enumerate(requests):
        client.submit(number, prompt, answer, priority=priority)
        for _ in range(stagger):
            client.step()
    client.run()
    for completion in client.completions.values():
        tokens, start = completion.sequence.tokens, completion.sequence.num_prompt
        assert len(tokens) == start + completion.sequence.params.max_tokens
        with torch.inference_mode():
            logits = pair.reference(torch.tensor([tokens])).logits[0, start - 1 : -1]
        chosen = torch.tensor(tokens[start:])
        expected = logits.log_softmax(-1)
        assert bool((expected.max(-1).values - expected.gather(1, chosen[:, None])[:, 0] < 1e-3).all())
        got = torch.tensor([entry.logprob for entry in completion.logprobs])
        torch.testing.assert_close(got, expected.gather(1, chosen[:, None])[:, 0], rtol=1e-3, atol=1e-3)


def test_the_window_bounds_the_held_blocks(pair: Pair) -> None:
    """A sequence holds its window's blocks if all layers are windowed, and all of its blocks if one layer is not."""
    attention_window = pair.runner.config.attention_window
    engine = Engine(pair.runner, max_batch=1, step_tokens=STEP)
    client = EngineClient(engine)
    sequence = client.submit(0, random_tokens(LONGEST - 40).tolist(), 40)
    most = 0
    while engine.has_work:
        client.step()
        most = max(most, engine.pool.num_held)
        if attention_window is None and engine.has_work:
            assert len(sequence.blocks) * BLOCK_SIZE >= sequence.num_tokens - 1
    if attention_window is None:
        assert most == LONGEST // BLOCK_SIZE
    else:
        assert attention_window == WINDOW
        assert most <= -(-(WINDOW + STEP) // BLOCK_SIZE) + 1
    assert engine.pool.num_free == NUM_BLOCKS


def test_a_second_turn_past_the_window_finds_the_first(pair: Pair) -> None:
    """Blocks that a sequence's window has left stay cached, so a second turn finds them."""
    client = EngineClient(Engine(pair.runner, max_batch=1, step_tokens=STEP))
    first = client.submit(0, random_tokens(100).tolist(), 20)
    client.run()
    second = client.submit(1, [*first.tokens, 11, 12, 13], 5)
    client.run()
    assert second.num_cached == (first.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


class Failing(Around):
    """A runner whose logits are NaN while it ``fails``."""

    fails = False

    def run(self, step: StepInput) -> StepOutput:
        output = self._runner.run(step)
        return dataclasses.replace(output, logits=output.logits * torch.nan) if self.fails else output


def test_a_failure_past_the_window_withdraws_the_earlier_blocks(pair: Pair) -> None:
    """When a sequence fails past its window, the blocks that it gave back before are no longer found."""
    runner = Failing(pair.runner)
    client = EngineClient(Engine(runner, max_batch=1, step_tokens=STEP))
    first = client.submit(0, random_tokens(100).tolist(), 20)
    while first.num_generated < 5:
        client.step()
    runner.fails = True
    client.step()
    runner.fails = False
    assert first.finish_reason is FinishReason.FAILED
    assert client.engine.pool.num_cached == 0
    again = client.submit(1, first.tokens[:100], 5)
    client.run()
    assert again.num_cached == 0


def test_model_info_reports_the_kv_bytes_that_windows_save(pair: Pair, model: ServedModel) -> None:
    """The model info reports the window, the KV bytes outside it, and the batch that fits."""
    runner = pair.runner
    served = dataclasses.replace(model, config=runner.config, runner=runner, max_context=256)
    info = describe(served, Engine(runner, max_batch=8, step_tokens=STEP).stats(), None)
    per_token = runner.kv_bytes_per_token
    if runner.config.attention_window is None:
        assert (info["attention_window"], info["kv_bytes_per_token_outside_window"]) == (None, per_token // 2)
        assert info["feasible_batch"] == {"256": 1}
    else:
        assert (info["attention_window"], info["kv_bytes_per_token_outside_window"]) == (WINDOW, 0)
        assert info["feasible_batch"] == {"256": NUM_BLOCKS // 4}


def test_a_sequence_longer_than_the_memory_is_served(pair: Pair) -> None:
    """A fully windowed model serves a sequence longer than the KV memory, and other models refuse it at once."""
    client = EngineClient(Engine(pair.small, max_batch=2, step_tokens=12))
    prompts = [random_tokens(120, seed).tolist() for seed in range(2)]
    if pair.small.config.attention_window is None:
        with pytest.raises(ValueError, match="a sequence of up to 150 tokens does not fit 5 KV blocks"):
            client.submit(0, prompts[0], 30)
        return
    for number, prompt in enumerate(prompts):
        client.submit(number, prompt, 30)
    client.run()
    expected = EngineClient(Engine(pair.runner, max_batch=2, step_tokens=STEP))
    for number, prompt in enumerate(prompts):
        expected.submit(number, prompt, 30)
    expected.run()
    assert [c.text for c in client.completions.values()] == [c.text for c in expected.completions.values()]


def test_the_longest_context_is_what_windows_allow(tmp_path: Path, source: ModelSource) -> None:
    """The longest context is what was asked for if the memory holds the windows and a step, else what it holds."""
    save(KINDS["mistral"], tmp_path)
    shutil.copy(source.directory / "tokenizer.json", tmp_path)
    memory = 5 * TorchRunner.block_bytes(read_config(tmp_path))
    completion: list[str] = []
    for step_tokens, longest in ((STEP, 200), (64, 80)):
        limits = EngineConfig(kv_memory=memory, max_batch=2, max_context=200, step_tokens=step_tokens)
        model = load_model(dataclasses.replace(source, directory=tmp_path), limits, completion.append)
        assert model.max_context == longest
    assert [sentence for sentence in completion if "longest context" in sentence] == [
        "the KV memory holds 80 tokens, so that is the longest context"
    ]


def test_windows_let_more_sequences_run_at_the_same_time(pair: Pair) -> None:
    """Four sequences run without preemption with windows, and do not fit the same memory without them."""
    client = EngineClient(Engine(pair.runner, max_batch=4, step_tokens=STEP, shares_prefixes=False))
    for number in range(4):
        client.submit(number, random_tokens(70, number).tolist(), 30)
    client.run()
    assert (client.engine.stats().preemptions > 0) == (pair.runner.config.attention_window is None)


@pytest.mark.parametrize(
    ("windows", "attention_window"),
    [((), None), ((24, None), None), ((None, None), None), ((24, 24), 24), ((16, 24), 24)],
)
def test_the_widest_layer_decides(windows: tuple[int | None, ...], attention_window: int | None) -> None:
    """The attention window is that of the widest layer, and None if one layer has no window."""
    config: ModelConfig = dataclasses.replace(read(num_hidden_layers=2), windows=windows)
    assert config.attention_window == attention_window
