"""The sampling kernel gets each sequence's own parameters and generator."""

from __future__ import annotations

import json

import torch

from backend.engine.sampler import sample_on_device
from backend.engine.sequence import SamplingParams, Sequence
from backend.text.detokenizer import Detokenizer, TokenBytes

VOCABULARY = 600
NO_TEXT = json.dumps({"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}, "added_tokens": []})
LOGITS = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))


def sequence(seed: int = 0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sequence:
    params = SamplingParams(max_tokens=9, temperature=temperature, top_k=top_k, top_p=top_p)
    return Sequence(0, [1], params, Detokenizer(TokenBytes(NO_TEXT, VOCABULARY)), seed)


def test_each_row_has_its_own_parameters() -> None:
    """Greedy, top_k=1 and tiny top_p rows give the most likely token beside a row that samples freely."""
    best = LOGITS.argmax(-1).tolist()
    rows = [sequence(temperature=0.0), sequence(top_k=1), sequence(top_p=1e-6), sequence(temperature=50.0)]
    assert sample_on_device(LOGITS, rows).tolist()[:3] == best[:3]
    assert sample_on_device(LOGITS, [sequence(temperature=0.0) for _ in range(4)]).tolist() == best


def test_a_seed_draws_the_same_in_any_batch() -> None:
    """A seeded row draws the same token alone and in another row of a batch, and its next draw is a new one."""
    alone, beside = sequence(7, 30.0), sequence(7, 30.0)
    first = sample_on_device(LOGITS[2:3], [alone]).item()
    batch = torch.stack([LOGITS[0], LOGITS[2]])
    assert sample_on_device(batch, [sequence(3, 30.0), beside])[1] == first
    later = [sample_on_device(LOGITS[2:3], [alone]).item() for _ in range(3)]
    assert set(later) != {first}
