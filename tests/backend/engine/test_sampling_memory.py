"""A lack of memory while tokens are sampled sheds sequences as one during the forward pass does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend.engine import step as step_module
from backend.engine.engine import Engine
from backend.engine.sampler import SampledToken, sample
from backend.engine.sequence import FinishReason, Sequence
from tests.backend.tiny_model import EngineClient, alone, fused

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.5, "repetition_penalty": 1.3, "prompt_logprobs": 0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0},
    {},
]
PROMPT = [*range(20, 60)]


def words(number: int) -> str:
    """The text of a request that runs alone."""
    client = EngineClient(Engine(fused(20), max_batch=1, step_tokens=256, shares_prefixes=False))
    client.submit(number, [*PROMPT, number + 11], 20, ignore_eos=True, **OPTIONS[number])
    client.run()
    return client.completions[number].text


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("out of memory")])
@pytest.mark.parametrize("late", [False, True])
def test_sampling_out_of_memory_ends_the_youngest(
    error: Exception, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling without memory sheds the youngest; the others lose no draw and get no penalty twice."""

    def narrow(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        if len(sequences) > 2:
            if late:
                sample(logits, sequences)
            raise error
        return sample(logits, sequences)

    expected = [words(number) for number in range(2)]
    monkeypatch.setattr(step_module, "sample", narrow)
    client = EngineClient(Engine(fused(20), max_batch=2, step_tokens=256))
    for number in range(2):
        client.submit(number, [*PROMPT, number + 11], 20, ignore_eos=True, **OPTIONS[number])
    for _ in range(5):
        client.step()
    client.engine.scheduler.max_batch = 4
    for number in (2, 3):
        client.submit(number, [*PROMPT, number + 11], 20, ignore_eos=True, **OPTIONS[number])
    client.run()
    ends = [completion.last and completion.last.finish_reason for completion in client.completions.values()]
    assert ends == [FinishReason.LENGTH] * 2 + [FinishReason.SHED] * 2
    assert [client.completions[number].text for number in range(2)] == expected
    assert len(client.completions[0].sequence.prompt_logprobs) == len(PROMPT) + 1
    assert client.engine.stats().out_of_memory == 2


def test_prompt_logprobs_out_of_memory_sheds_the_youngest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs without memory shed the youngest, and a prompt's are recorded once though the step is repeated."""
    expected = alone(fused(20), PROMPT, 3, prompt_logprobs=0).sequence.prompt_logprobs
    failures = iter([False] * 10 + [True])
    real = torch.log_softmax

    def scarce(*arguments: Any, **options: Any) -> torch.Tensor:
        if next(failures, False):
            raise torch.OutOfMemoryError("out of memory")
        return real(*arguments, **options)

    client = EngineClient(Engine(fused(20), max_batch=2, step_tokens=256))
    client.submit(0, PROMPT, 3, prompt_logprobs=0)
    client.submit(1, [30, 31, 32], 3)
    monkeypatch.setattr(torch, "log_softmax", scarce)
    client.run()
    assert client.completions[0].sequence.prompt_logprobs == expected
    ends = [completion.last and completion.last.finish_reason for completion in client.completions.values()]
    assert ends == [FinishReason.LENGTH, FinishReason.SHED]
