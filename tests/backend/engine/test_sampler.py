"""Each row is sampled on its own: filters, penalties and seeds mean the same alone and in any batch."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.sampler import _candidates, _filter, _invert, sample
from backend.engine.sequence import SamplingParams, Sequence
from backend.text.detokenizer import Detokenizer
from tests.backend.tiny_model import token_bytes

VOCABULARY = 2500
NO_DEADLINE = settings(deadline=None, max_examples=60)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 2000]),
        "min_p": st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


def make(seed: int = 0, tokens: list[int] | None = None, **params: Any) -> Sequence:
    sampling = SamplingParams(max_tokens=100, **params)
    sequence = Sequence(seed, [5, 6], sampling, Detokenizer(token_bytes()), seed)
    for token in tokens or []:
        sequence.append(token)
    return sequence


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


@NO_DEADLINE
@given(params=st.lists(PARAMS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_row_alone_is_the_row_in_any_batch(params: list[dict[str, Any]], seed: int) -> None:
    """Token and log-probabilities are equal, bit for bit, whatever the other rows ask for."""
    matrix = logits(len(params), seed)
    together = sample(matrix.clone(), [make(row, [7, 7, 9], **p) for row, p in enumerate(params)])
    for row, p in enumerate(params):
        alone = sample(matrix[row : row + 1].clone(), [make(row, [7, 7, 9], **p)])
        assert alone[0] == together[row]


@NO_DEADLINE
@given(params=PARAMS, seed=st.integers(0, 1000))
def test_the_chosen_token_passes_every_filter(params: dict[str, Any], seed: int) -> None:
    """Checked against the filters' definitions, written out the slow way."""
    params |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    matrix = logits(1, seed)
    token = sample(matrix.clone(), [make(seed, **params)])[0].token_id
    assert token in allowed(matrix[0], **params)


def allowed(row: torch.Tensor, temperature: float, top_p: float, top_k: int, min_p: float, **_: Any) -> set[int]:
    order = row.argsort(descending=True, stable=True).tolist()
    if temperature == 0:
        return {order[0]}
    weights = torch.softmax((row.double() - row.max()) / temperature, dim=-1).tolist()
    kept = order[:top_k] if top_k else order
    total = sum(weights[token] for token in kept)
    nucleus: list[int] = []
    mass = 0.0
    for token in kept:
        # A hair of room for sums that run in another order, of float32 numbers.
        if nucleus and mass >= top_p * total * (1 + 1e-6) and top_p < 1:
            break
        nucleus.append(token)
        mass += weights[token]
    return {token for token in nucleus if weights[token] >= min_p * weights[order[0]] * (1 - 1e-6)}


def test_draws_follow_the_distribution() -> None:
    """Thousands of draws from four tokens come out in the right shares, with a filter and without."""
    row = torch.full((VOCABULARY,), -50.0)
    row[[3, 40, 500, 2499]] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for params, shares in (
        ({}, {3: 0.4, 40: 0.3, 500: 0.2, 2499: 0.1}),
        ({"top_p": 0.65}, {3: 4 / 7, 40: 3 / 7}),
        ({"top_k": 3}, {3: 4 / 9, 40: 3 / 9, 500: 2 / 9}),
        ({"min_p": 0.4}, {3: 4 / 9, 40: 3 / 9, 500: 2 / 9}),
    ):
        sequence = make(**params)
        counts: Counter[int] = Counter()
        for _ in range(10):
            counts.update(s.token_id for s in sample(row.repeat(200, 1), [sequence] * 200))
        assert counts.keys() == shares.keys()
        for token, share in shares.items():
            assert counts[token] / 2000 == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-46, 1e-40])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_the_smallest_temperatures_are_greedy(temperature: float, filters: dict[str, Any]) -> None:
    """Down to the smallest number there is, also beside a row of another temperature."""
    matrix = logits(2)
    matrix[0, 3] = float("-inf")
    beside = make(seed=1, temperature=1.0)
    for seed in range(5):
        sequence = make(seed, temperature=temperature, **filters)
        assert sample(matrix.clone(), [sequence, beside])[0].token_id == int(matrix[0].argmax())


def test_the_greedy_choice_among_equals_is_the_first() -> None:
    """Whatever the seed."""
    matrix = torch.zeros(20, VOCABULARY)
    assert {s.token_id for s in sample(matrix, [make(seed, temperature=0.0) for seed in range(20)])} == {0}


def test_penalties_and_biases_do_what_they_say() -> None:
    """Presence counts once, frequency each time, repetition scales, and a bias of -100 forbids."""
    base = torch.zeros(1, VOCABULARY)
    base[0, :4] = torch.tensor([10.0, 9.0, 8.0, 7.0])

    def best(tokens: list[int], **params: Any) -> int:
        return sample(base.clone(), [make(tokens=tokens, temperature=0.0, **params)])[0].token_id

    assert best([]) == 0
    assert best([0, 0, 0], presence_penalty=0.9) == 0
    assert best([0, 0, 0], presence_penalty=1.1) == 1
    assert best([0, 0, 0], frequency_penalty=0.3) == 0
    assert best([0, 0, 0], frequency_penalty=0.4) == 1
    assert best([0], repetition_penalty=1.2) == 1
    assert best([], logit_bias={0: -100.0}) == 1
    assert best([], logit_bias={700: 20.0}) == 700


def test_repetition_looks_at_the_prompt_but_the_other_penalties_do_not() -> None:
    """As at OpenAI and in the paper."""
    base = torch.zeros(1, VOCABULARY)
    base[0, [5, 8]] = torch.tensor([10.0, 9.5])  # 5 is in the prompt

    def best(**params: Any) -> int:
        return sample(base.clone(), [make(temperature=0.0, **params)])[0].token_id

    assert best(presence_penalty=2.0, frequency_penalty=2.0) == 5
    assert best(repetition_penalty=1.2) == 8


def test_logprobs_are_those_of_the_model() -> None:
    """Penalties, temperature and filters choose, but what is reported is the distribution before them."""
    matrix = logits(1)
    expected = torch.log_softmax(matrix[0], dim=-1)
    first = int(matrix.argmax())
    sampled = sample(matrix.clone(), [make(temperature=0.0, logit_bias={first: -100.0}, logprobs=2)])[0]
    assert sampled.token_id != first
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(expected[sampled.token_id]))
    assert [token for token, _ in sampled.logprobs.top] == expected.topk(2).indices.tolist()


def test_there_are_no_more_logprobs_than_tokens() -> None:
    """Whoever asks for more alternatives than the vocabulary has gets all of it."""
    (sampled,) = sample(logits(1)[:, :3].clone(), [make(temperature=0.0, logprobs=5)])
    assert sampled.logprobs is not None
    assert {token for token, _ in sampled.logprobs.top} == {0, 1, 2}


def test_rows_computed_in_inference_mode_can_be_adjusted() -> None:
    """Bias and penalties change what the reference runner hands over, in a thread that is not in that mode."""
    with torch.inference_mode():
        rows = logits(1).clone()
    sampled = sample(rows, [make(0, [7, 7], logit_bias={9: 100.0}, frequency_penalty=1.0, repetition_penalty=1.2)])
    assert sampled[0].token_id == 9


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_choose_some_token(value: float, filters: dict[str, Any]) -> None:
    """Who asks for it throws it away; what matters is that the other rows of the batch get theirs."""
    matrix = logits(2)
    matrix[0, 7] = value
    good = sample(matrix[1:].clone(), [make(seed=1, temperature=1.0, **filters)])[0]
    rows = [make(temperature=1.0, **filters), make(seed=1, temperature=1.0, **filters)]
    assert sample(matrix.clone(), rows)[1] == good


@NO_DEADLINE
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 0.3, 1.0]), min_size=1, max_size=900).filter(any),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_where_the_running_sum_passes_the_number(weights: list[float], uniform: float) -> None:
    """Whatever block it is in; and a token without weight, which a grammar has ruled out, is never drawn."""
    array = np.array(weights, dtype=np.float32)
    running = array.cumsum(dtype=np.float64)
    token = _invert(array, uniform)
    assert array[token] > 0
    room = 1e-5 * running[-1]
    assert running[token] >= uniform * running[-1] - room
    assert running[token] - array[token] <= uniform * running[-1] + room


def test_each_token_has_its_share_of_the_numbers() -> None:
    """From its beginning on, the first and the last of a block too; what has no weight has no share."""
    weights = np.ones(1024, dtype=np.float32)
    for at in (0.0, 0.5):
        assert [_invert(weights, (token + at) / 1024) for token in range(1024)] == list(range(1024))
    weights[:300] = 0
    assert _invert(weights, 0.0) == 300


def test_the_largest_number_draws_the_last_token_with_weight() -> None:
    """Also where the sum over the blocks is a little more than the sum over the tokens."""
    for seed in range(50):
        weights = np.random.default_rng(seed).random(300, dtype=np.float32)
        weights[150:] = 0
        assert _invert(weights, float(np.nextafter(1, 0))) == 149


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 2000])
def test_every_token_that_passes_the_filters_can_be_drawn(temperature: float, top_k: int) -> None:
    """What one filter leaves out changes nothing about what another is a share of, whichever are set."""
    row = logits(1, seed=int(10 * temperature) + top_k)[0]
    weights = np.exp((row.numpy() - float(row.max())) / np.float32(temperature))
    mass = float(weights.sum())
    for top_p, min_p in itertools.product([0.0, 0.1, 0.9, 0.999, 1.0], [0.0, 0.001, 0.05, 0.5, 1.0]):
        params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        candidates = _candidates(weights, mass, params)
        kept = {int(token) for token in candidates[: len(_filter(weights[candidates], mass, params))]}
        expected = allowed(row, temperature, top_p, top_k, min_p)
        # One token more or less where a sum ends at a filter's edge.
        assert len(kept ^ expected) <= 1, params


def test_top_k_are_k() -> None:
    """Also where there is a wide gap between two of them."""
    weights = np.array([1.0, 0.5, 0.005, 0.004, 0.003], dtype=np.float32)
    params = SamplingParams(max_tokens=1, top_k=3)
    assert _candidates(weights, float(weights.sum()), params)[:3].tolist() == [0, 1, 2]


def test_equals_go_by_their_ids_and_pass_min_p_together() -> None:
    """A token as likely as the limit asks is kept, as in transformers."""
    weights = np.array([0.5, 1.0, 1.0, 0.5, 0.1], dtype=np.float32)
    for min_p, kept in ((0.5, [1, 2, 0, 3]), (1.0, [1, 2])):
        params = SamplingParams(max_tokens=1, min_p=min_p)
        candidates = _candidates(weights, float(weights.sum()), params)
        assert candidates[: len(_filter(weights[candidates], float(weights.sum()), params))].tolist() == kept


def test_min_p_does_not_change_what_top_p_is_a_share_of() -> None:
    """Top-k, then top-p of its mass, then min-p, as in transformers."""
    weights = np.array([1.0] + [0.05] * 9 + [0.009] * 200, dtype=np.float32)
    params = SamplingParams(max_tokens=1, top_k=200, top_p=0.6, min_p=0.01)
    mass = float(weights.sum())

    assert len(_filter(weights[_candidates(weights, mass, params)], mass, params)) == 10
