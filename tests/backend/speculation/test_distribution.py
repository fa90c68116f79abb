"""What is sampled beside drafts is distributed as what is sampled without them (chi-square tests, fixed seeds)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from backend.engine.engine import Engine
from backend.engine.sampler import accept_or_sample, distribution, draw_from
from backend.engine.sequence import SamplingParams, Sequence
from backend.engine.step import Speculator
from backend.speculation.draft_model import DraftModel
from backend.text.detokenizer import Detokenizer
from tests.backend.speculation.drafting import VOCABULARY, Foresight, eager
from tests.backend.tiny_model import EngineClient, fused, token_bytes

DRAWS = 5_000
# Of sums of squares of normal numbers, as Wilson and Hilferty approximate them: beyond it once in 10,000 runs.
QUANTILE = 3.72


def chi_square_limit(freedom: int) -> float:
    return float(freedom * (1 - 2 / (9 * freedom) + QUANTILE * (2 / (9 * freedom)) ** 0.5) ** 3)


def assert_distributed(counts: Counter[int], expected: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    """Tokens that are expected less than eight times are one class; what has no probability never comes."""
    draws = sum(counts.values())
    shares = expected.astype(np.float64) / expected.sum(dtype=np.float64) * draws
    seen = np.array([counts[token] for token in range(len(expected))], dtype=np.float64)
    assert not seen[expected == 0].any()
    common = shares >= 8
    classes = [*zip(seen[common], shares[common], strict=True)]
    if (rest := shares[~common].sum()) >= 1:
        classes.append((seen[~common].sum(), rest))
    statistic = sum((count - share) ** 2 / share for count, share in classes)
    assert len(classes) > 2
    assert statistic < chi_square_limit(len(classes) - 1)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("quality", ["near", "far"])
def test_accepted_and_drawn_again(temperature: float, filters: dict[str, float], quality: str) -> None:
    """Whatever distribution proposed a token, the one that comes is distributed as the sequence's own samples."""
    numbers = np.random.default_rng(5)
    logits = numbers.normal(0, 0.6, 12).astype(np.float32)
    noise = {"near": 0.3, "far": 2.0}[quality]
    params = SamplingParams(max_tokens=1, temperature=temperature, **filters)  # type: ignore[arg-type]
    drawn_from = distribution(logits + noise * numbers.normal(size=12).astype(np.float32), params)
    sequence = Sequence(0, [1], params, Detokenizer(token_bytes()), 7)
    proposals = random.Random(3)  # noqa: S311
    counts: Counter[int] = Counter()
    accepted = 0
    for _ in range(DRAWS):
        proposed = draw_from(drawn_from, proposals.random())
        row = torch.from_numpy(logits.copy())[None]
        token = accept_or_sample(row, sequence, proposed, drawn_from).token_id
        accepted += token == proposed
        counts[token] += 1
    target = distribution(logits, params)
    assert_distributed(counts, target)
    # As many are accepted as can be: 1 minus the distance of the distributions (total variation).
    most = np.minimum(target, drawn_from).sum()
    assert accepted / DRAWS >= most - 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.3])
@pytest.mark.parametrize("method", ["drawn", "certain", "draft-model"])
def test_answers_of_an_engine(method: str, temperature: float) -> None:
    """The first two tokens of 1,500 answers to one prompt, with drafts in steps of many sequences."""
    runner, prompt = fused(200), [*range(20, 37), *range(20, 37)]
    first, second = Counter[int](), Counter[int]()
    speculators: dict[str, Callable[[], Speculator]] = {
        "drawn": lambda: Foresight({}, 1, drawn=True),
        "certain": lambda: Foresight(dict.fromkeys(range(1500), prompt + prompt[:2]), 1),
        "draft-model": lambda: eager(DraftModel(fused(200, "int4"), VOCABULARY)),
    }
    client = EngineClient(Engine(runner, max_batch=16, step_tokens=128, speculator=speculators[method]()))
    # Nothing is drawn from among few tokens only: then a class has enough of them.
    options = {"temperature": temperature, "top_k": 6, "ignore_eos": True, "logprobs": None}
    for number in range(1500):
        client.submit(number, prompt, 3, **options)
    client.run()
    answers = [client.completions[number].sequence.tokens[len(prompt) :] for number in range(1500)]
    first.update(answer[0] for answer in answers)
    likeliest = first.most_common(1)[0][0]
    second.update(answer[1] for answer in answers if answer[0] == likeliest)
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=6)
    assert_distributed(first, expected(prompt, params))
    assert_distributed(second, expected([*prompt, likeliest], params))
    counts = client.engine.stats().drafts
    assert sum(count.accepted_tokens for count in counts.values()) > 0


def expected(tokens: list[int], params: SamplingParams) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The distribution of the next token."""
    client = EngineClient(Engine(fused(20), max_batch=1, step_tokens=128, shares_prefixes=False))
    sequence = client.submit(0, tokens, 1)
    sequence.probes = "fresh"
    client.run()
    last = client.completions[0].last
    assert last is not None
    assert last.logits is not None
    return distribution(last.logits, params)
