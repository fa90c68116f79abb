"""When drafts are worth a step of their own."""

from __future__ import annotations

import pytest

from backend.engine.scheduler import Chunk
from backend.engine.sequence import SamplingParams, Sequence
from backend.speculation.speculator import AdaptiveSpeculator
from backend.speculation.step_costs import StepCosts
from backend.text.detokenizer import Detokenizer
from tests.backend.tiny_model import token_bytes

PROMPT, ANSWER = list(range(20, 50)), list(range(60, 120))


def decoding(number: int, prediction: list[int]) -> Chunk:
    """A step's row of a sequence with 10 tokens of its answer."""
    params = SamplingParams(max_tokens=60, temperature=0.0)
    sequence = Sequence(number, PROMPT, params, Detokenizer(token_bytes()), number, prediction=prediction)
    sequence.tokens += ANSWER[:10]
    return Chunk(sequence, sequence.num_tokens - 1, 1)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_draft_may_pay_though_its_first_token_does_not(batch: int) -> None:
    """A step with drafts takes three times as long as a plain one, however many rows it has, as on a device: the
    speculator wants to see the tokens of the step under way, and then proposes.
    """
    speculator = AdaptiveSpeculator(StepCosts({1: 1.0, 32: 1.0}, {2: 3.0, 64: 3.0}))
    chunks = [decoding(number, ANSWER) for number in range(batch)]
    assert speculator.wants_step(chunks)
    drafts = speculator.propose(chunks, 512, lambda sequence, length: length)
    assert [drafts[number].token_ids[:3] for number in range(batch)] == [tuple(ANSWER[10:13])] * batch


def test_a_draft_that_costs_more_than_it_gives_stops_nothing() -> None:
    """Where a step with drafts takes twenty times as long, or nothing is found, the next step need not wait."""
    dear = AdaptiveSpeculator(StepCosts({1: 1.0, 32: 1.0}, {2: 20.0, 64: 20.0}))
    assert not dear.wants_step([decoding(0, ANSWER)])
    cheap = AdaptiveSpeculator(StepCosts({1: 1.0, 32: 1.0}, {2: 1.0, 64: 1.0}))
    assert not cheap.wants_step([decoding(0, list(range(120, 150)))])
