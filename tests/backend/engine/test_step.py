"""A pending step knows which of its rows still count and which tokens are still on the device."""

from __future__ import annotations

import torch

from backend.engine.engine import Engine
from backend.engine.sequence import FinishReason
from backend.engine.step import PendingTokens
from tests.backend.engine.test_engine_overlap import Device, plain
from tests.backend.tiny_model import EngineClient, fused


def test_tokens_of_nan_rows_are_read_as_minus_one() -> None:
    """The token of a row with NaN or infinity is read as -1, and the next step still gets a valid token for it."""
    logits = torch.tensor([[0.0, torch.inf], [torch.nan, 0.0], [-torch.inf, 1.0], [2.0, 3.0]])
    tokens = PendingTokens(logits, torch.tensor([1, -1, 1, 0]))
    assert tokens.read() == [-1, -1, 1, 0]
    assert tokens.of([0, 1, 2, 3]).tolist() == [1, 0, 1, 0]
    assert tokens.of([1, 3]).tolist() == [0, 0]
    assert tokens.of([2]).tolist() == [1]


def test_a_step_whose_sequences_have_left_delays_no_other() -> None:
    """A sequence that arrives after all others have left gets its first token from the next step."""
    client = EngineClient(Engine(Device(fused(20)), max_batch=4, step_tokens=64))
    plain(client, 0)
    for _ in range(3):
        client.step()
    client.engine.abort(0)
    plain(client, 1)
    assert [output.sequence_id for output in client.step()] == [1]
    assert client.engine.stats().steps == 4
    client.run()


def test_an_aborted_sequence_takes_nothing_from_the_others() -> None:
    """The row of an aborted sequence in the step under way is counted, and later steps are still launched ahead."""
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


def test_an_aborted_sequence_is_not_shed_again() -> None:
    """A step without memory sheds half of the sequences that remain and ignores the aborted one."""
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
