"""The engine with the CUDA runner saves prefixes and restores them while other sequences decode."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.sequence import SamplingParams
from backend.runners.cuda.runner import CudaRunner
from backend.text.detokenizer import TokenBytes
from tests.backend.runners.cuda.kv_shelf import KvShelf
from tests.backend.runners.cuda.random_model import CONFIG, random_weights
from tests.backend.runners.cuda.simulated_streams import SimulatedDevice, host_stream, use_streams

NO_TEXT = json.dumps({"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}, "added_tokens": []})
TABLE = TokenBytes(NO_TEXT, CONFIG.vocab_size)
PREFIX = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 3 * BLOCK_SIZE).tolist()
PROMPTS = [[7, 8], [*PREFIX, 5, 6, 4], [9], [*PREFIX[: 2 * BLOCK_SIZE], 1]]


def engine_over(device: SimulatedDevice, shelf: KvShelf) -> Engine:
    """An engine whose copies to and from the runner's memory happen as late as possible."""
    runner = CudaRunner(CONFIG, random_weights(CONFIG), 30, 128, 8, torch.float32, "cpu")
    block = CONFIG.num_layers * 2 * CONFIG.num_kv_heads * BLOCK_SIZE * CONFIG.head_dim * 4
    use_streams(runner, device.beside(host_stream()), 6 * block)
    return Engine(runner, 8, 128, kv_connector=shelf)


def answers(engine: Engine, shelf: KvShelf, device: SimulatedDevice, given_up: int | None = None) -> list[list[int]]:
    """Tokens of every prompt; the second and the fourth come when the others are decoding.

    Args:
        given_up: number of a prompt that is aborted while its beginning is on its way.
    """
    asked = []
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=7 - number, temperature=0.0, ignore_eos=True)
        asked.append(shelf.asking(number, prompt, params, TABLE))
    for number in (0, 2):
        engine.add(asked[number])
    for step in range(30):
        engine.step()
        device.get_on(3)
        if step == 1:
            for number in (1, 3):
                engine.add(asked[number])
        if step == 3 and given_up is not None:
            assert [fetch.sequence_id for fetch in shelf.fetches] == [given_up]
            engine.abort(given_up)
        if step % 3 == 0:
            shelf.bring(engine)
        shelf.put_away(engine)
        assert engine.problems() == []
        if not engine.has_work:
            break
    assert not engine.has_work
    assert engine.pool.num_free == engine.runner.num_blocks
    return [sequence.tokens[sequence.num_prompt :] for sequence in asked]


@pytest.fixture(scope="module")
def computed() -> tuple[KvShelf, list[list[int]]]:
    """The shelf and the answers of an engine that found no prefix."""
    device, shelf = SimulatedDevice(1), KvShelf()
    tokens = answers(engine_over(device, shelf), shelf, device)
    assert len(shelf.frames) == 3
    assert shelf.fetched == 0
    return shelf, tokens


@pytest.mark.parametrize("given_up", [None, 1])
def test_answers_on_a_restored_prefix_are_the_same(
    computed: tuple[KvShelf, list[list[int]]], given_up: int | None
) -> None:
    """Answers on a restored prefix are those on a computed one, also if another restore is given up."""
    kept, expected = computed
    device, shelf = SimulatedDevice(2), KvShelf()
    shelf.frames = kept.frames
    got = answers(engine_over(device, shelf), shelf, device, given_up)
    assert shelf.fetched == (3 if given_up is None else 2), (
        "the fourth shares two blocks of the second, or fetches them"
    )
    for number, (ours, wanted) in enumerate(zip(got, expected, strict=True)):
        assert ours == wanted[: len(ours)]
        assert len(ours) == len(wanted) or number == given_up
