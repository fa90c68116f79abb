"""What is known of a step that is under way: which of its rows still count, and which tokens are on their way."""

from __future__ import annotations

import torch

from backend.engine.engine import Engine
from backend.engine.sequence import FinishReason
from backend.engine.step import PendingTokens
from tests.backend.engine.test_engine_overlap import Device, plain
from tests.backend.tiny_model import EngineClient, fused


def test_tokens_of_unsound_rows_arrive_as_none() -> None:
    """Minus infinity is sound. The next step gets a token for each row all the same: it has to compute something."""
    logits = torch.tensor([[0.0, torch.inf], [torch.nan, 0.0], [-torch.inf, 1.0], [2.0, 3.0]])
    tokens = PendingTokens(logits, torch.tensor([1, -1, 1, 0]))
    assert tokens.read() == [-1, -1, 1, 0]
    assert tokens.of([0, 1, 2, 3]).tolist() == [1, 0, 1, 0]
    assert tokens.of([1, 3]).tolist() == [0, 0]
    assert tokens.of([2]).tolist() == [1]


def test_a_step_of_which_all_have_left_delays_nobody() -> None:
    """Who comes next gets his first token from the next step, as if there had been none before it."""
    client = EngineClient(Engine(Device(fused(20)), max_batch=4, step_tokens=64))
    plain(client, 0)
    for _ in range(3):
        client.step()
    client.engine.abort(0)
    plain(client, 1)
    assert [output.sequence_id for output in client.step()] == [1]
    assert client.engine.stats().steps == 4
    client.run()


def test_who_leaves_takes_nothing_from_the_others() -> None:
    """His row of the step under way has been computed, so it is counted; the steps after it go on ahead."""
    device = Device(fused(20))
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    plain(client, 0, 10)
    plain(client, 1, 10)
    for _ in range(3):
        client.step()
    client.engine.abort(0)
    client.run()
    assert device.ahead == [False] + [True] * 9
    stats = client.engine.stats()
    assert (stats.batch_slots_used, stats.computed_rows, stats.first_time_rows) == (14, 14, 13)


def test_who_has_left_is_not_ended_again_when_the_memory_ends() -> None:
    """The half that is ended is that of those who are still there."""
    device = Device(fused(20))
    device.fails_at = 3
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    for number in range(4):
        plain(client, number)
    client.step()
    client.step()
    client.engine.abort(3)
    ended = [output.sequence_id for output in client.step() if output.finish_reason is FinishReason.SHED]
    assert ended == [1, 2]
    client.run()
