"""Drafts on a device: chains and trees, right and wrong ones, change no greedy answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import pytest
import torch

from backend.engine.engine import Engine
from backend.engine.sequence import SamplingParams, Sequence
from backend.engine.step import Speculator
from backend.runners.cuda.runner import CudaRunner
from backend.runners.warm_up import warm_up
from backend.text.detokenizer import Detokenizer, TokenBytes
from tests.backend.runners.cuda.random_model import CONFIG, random_weights
from tests.backend.speculation.drafting import VOCABULARY, Foresight, eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MODEL = dataclasses.replace(CONFIG, vocab_size=VOCABULARY)
TABLE = TokenBytes(
    json.dumps({"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}), VOCABULARY
)
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def answers(
    runner: CudaRunner, speculator: Speculator | None, predictions: Mapping[int, list[int]]
) -> tuple[dict[int, list[int]], int]:
    """Whole sequences of six requests in one batch, and how many tokens of drafts were accepted."""
    engine = Engine(runner, 8, 512, speculator=speculator)
    sequences = [
        Sequence(
            number,
            [11 + number] * (3 + 7 * number),
            PARAMS,
            Detokenizer(TABLE),
            number,
            prediction=predictions.get(number, ()),
        )
        for number in range(6)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    assert engine.problems() == []
    accepted = sum(counts.accepted_tokens for counts in engine.stats().drafts.values())
    return {sequence.id: list(sequence.tokens) for sequence in sequences}, accepted


def test_drafts_change_no_greedy_answer() -> None:
    """What a client predicts, and chains and trees that are wrong in places."""
    runner = CudaRunner(MODEL, random_weights(MODEL), 64, 256, 8, torch.float32)
    runner.record(lambda sentence: None)
    warm_up(runner, TABLE, 256)
    plain, _ = answers(runner, None, {})
    predictions = {number: tokens[3 + 7 * number :] for number, tokens in plain.items()}
    for speculator, predicted in (
        (eager(), predictions),
        (Foresight(plain, 1), {}),
        (Foresight(plain, 2, branches=True), {}),
    ):
        found, accepted = answers(runner, speculator, predicted)
        assert found == plain
        assert accepted > 0
