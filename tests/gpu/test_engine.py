"""The engine on a device launches steps ahead and gives the same answers as step by step."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import triton

from backend.engine.engine import Engine
from backend.engine.sequence import SamplingParams, Sequence
from backend.engine.step import InFlightStep
from backend.runners.cuda.runner import CudaRunner
from backend.runners.warm_up import warm_up
from backend.text.detokenizer import Detokenizer, TokenBytes
from tests.backend.runners.cuda.kv_shelf import KvShelf
from tests.backend.runners.cuda.random_model import CONFIG, random_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TABLE = TokenBytes(
    json.dumps({"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}), CONFIG.vocab_size
)
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
]


def runner() -> CudaRunner:
    made = CudaRunner(CONFIG, random_weights(CONFIG), 64, 256, 8, torch.float32)
    made.record(lambda sentence: None)
    warm_up(made, TABLE, 256)
    return made


def answers(engine: Engine, **options: Any) -> list[list[int]]:
    """Tokens of eight requests of different lengths in one batch."""
    sequences = []
    for index in range(8):
        params = SamplingParams(max_tokens=20 + index, ignore_eos=True, **PARAMS[index % len(PARAMS)], **options)
        sequences.append(Sequence(index, [11 + index] * (3 + 5 * index), params, Detokenizer(TABLE), index))
        engine.add(sequences[-1])
    while engine.has_work:
        engine.step()
    assert engine.problems() == []
    return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


def test_launching_ahead_changes_no_token() -> None:
    """Launching ahead changes no token, greedy or sampled, against an engine that logprobs keep from it."""
    made = runner()
    assert answers(Engine(made, 8, 512)) == answers(Engine(made, 8, 512, shares_prefixes=False), logprobs=0)


def test_a_step_returns_tokens_while_the_next_one_is_computed() -> None:
    """A step returns its tokens while the device still computes the next one."""
    made = runner()
    engine = Engine(made, 4, 512)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    engine.add(Sequence(0, [1, 2, 3], params, Detokenizer(TABLE), 0))
    engine.step()
    torch.cuda.synchronize()
    launch = made.run
    cuda: Any = torch.cuda  # its events have no types
    ended: list[Any] = []

    def slow(step: Any) -> Any:
        output = launch(step)
        cuda._sleep(100_000_000)  # cycles: some 50 ms
        event = cuda.Event()
        event.record()
        ended.append(event)
        return output

    made.run = slow  # type: ignore[method-assign]
    assert engine.step()
    # Whether a step is under way shows in no output, so the private field is read.
    assert isinstance(engine._in_flight, InFlightStep)
    assert len(ended) == 1
    assert not ended[0].query(), "the tokens of the step before came without waiting for this one"


def test_prefixes_are_kept_and_restored_while_others_decode() -> None:
    """Prefixes are saved and restored while others decode, and answers on them are those on computed ones."""
    prefix = [(7 * place) % CONFIG.vocab_size for place in range(9 * 16)]
    shelf = KvShelf()
    answered = []
    for _ in range(2):
        engine = Engine(runner(), 8, 512, kv_connector=shelf)
        sequences = [
            shelf.asking(number, prompt, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True), TABLE)
            for number, prompt in enumerate([[1, 2, 3], [*prefix, 4, 5], [6]])
        ]
        for number in (0, 2):
            engine.add(sequences[number])
        for step in range(200):
            engine.step()
            if step == 10:
                engine.add(sequences[1])
            if step % 4 == 0:
                shelf.bring(engine)
            shelf.put_away(engine)
            assert engine.problems() == []
            if not engine.has_work:
                break
        assert not engine.has_work
        answered.append([sequence.tokens[sequence.num_prompt :] for sequence in sequences])
    assert sequences[1].num_cached == len(prefix)
    assert shelf.fetched == 9
    assert answered[0] == answered[1]


def test_requests_after_the_warm_up_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the warm-up no request compiles a kernel, whatever its options and sizes."""
    engine = Engine(runner(), 8, 100)
    compiled: list[str] = []

    def note(*, repr: str, **_: Any) -> None:
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    answers(engine)
    answers(engine, presence_penalty=0.5)
    assert compiled == []
