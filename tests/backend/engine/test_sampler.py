"""Each row is sampled on its own: filters, penalties and seeds have the same effect alone and in any batch."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# The private steps of `sample` take given numbers where it draws them.
from backend.engine.sampler import _candidates, _filter, draw_from, sample
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
    """A row's token and log-probabilities are bitwise the same alone and in any batch."""
    matrix = logits(len(params), seed)
    together = sample(matrix.clone(), [make(row, [7, 7, 9], **p) for row, p in enumerate(params)])
    for row, p in enumerate(params):
        alone = sample(matrix[row : row + 1].clone(), [make(row, [7, 7, 9], **p)])
        assert alone[0] == together[row]


@NO_DEADLINE
@given(params=PARAMS, seed=st.integers(0, 1000))
def test_the_chosen_token_passes_every_filter(params: dict[str, Any], seed: int) -> None:
    """The chosen token passes every filter, by a slow reference of the filters' definitions."""
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


@pytest.mark.parametrize(
    ("params", "shares"),
    [
        ({}, {3: 0.4, 40: 0.3, 500: 0.2, 2499: 0.1}),
        ({"top_p": 0.65}, {3: 4 / 7, 40: 3 / 7}),
        ({"top_k": 3}, {3: 4 / 9, 40: 3 / 9, 500: 2 / 9}),
        ({"min_p": 0.4}, {3: 4 / 9, 40: 3 / 9, 500: 2 / 9}),
    ],
    ids=["no filter", "top_p", "top_k", "min_p"],
)
def test_draws_follow_the_distribution(params: dict[str, Any], shares: dict[int, float]) -> None:
    """Thousands of draws from four tokens have the right shares, with and without a filter."""
    row = torch.full((VOCABULARY,), -50.0)
    row[[3, 40, 500, 2499]] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
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
    """Sampling is greedy down to the smallest positive temperature, also beside a row of another temperature."""
    matrix = logits(2)
    matrix[0, 3] = float("-inf")
    beside = make(seed=1, temperature=1.0)
    for seed in range(5):
        sequence = make(seed, temperature=temperature, **filters)
        assert sample(matrix.clone(), [sequence, beside])[0].token_id == int(matrix[0].argmax())


def test_the_greedy_choice_among_equals_is_the_first() -> None:
    """The greedy choice among equal logits is the lowest token id, whatever the seed."""
    matrix = torch.zeros(20, VOCABULARY)
    assert {s.token_id for s in sample(matrix, [make(seed, temperature=0.0) for seed in range(20)])} == {0}


def test_penalties_and_biases_change_the_logits_as_defined() -> None:
    """The presence penalty counts once, frequency counts each time, repetition scales, and a bias of -100 forbids."""
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
    """The repetition penalty covers the prompt; presence and frequency penalties do not, as at OpenAI."""
    base = torch.zeros(1, VOCABULARY)
    base[0, [5, 8]] = torch.tensor([10.0, 9.5])  # 5 is in the prompt

    def best(**params: Any) -> int:
        return sample(base.clone(), [make(temperature=0.0, **params)])[0].token_id

    assert best(presence_penalty=2.0, frequency_penalty=2.0) == 5
    assert best(repetition_penalty=1.2) == 8


def test_logprobs_are_those_of_the_model() -> None:
    """Reported logprobs are the model's distribution before penalties, temperature and filters."""
    matrix = logits(1)
    expected = torch.log_softmax(matrix[0], dim=-1)
    first = int(matrix.argmax())
    sampled = sample(matrix.clone(), [make(temperature=0.0, logit_bias={first: -100.0}, logprobs=2)])[0]
    assert sampled.token_id != first
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(expected[sampled.token_id]))
    assert [token for token, _ in sampled.logprobs.top] == expected.topk(2).indices.tolist()


def test_there_are_no_more_logprobs_than_tokens() -> None:
    """A request for more alternatives than the vocabulary has gets the whole vocabulary."""
    (sampled,) = sample(logits(1)[:, :3].clone(), [make(temperature=0.0, logprobs=5)])
    assert sampled.logprobs is not None
    assert {token for token, _ in sampled.logprobs.top} == {0, 1, 2}


def test_rows_computed_in_inference_mode_can_be_adjusted() -> None:
    """Biases and penalties are applied to logits from inference mode in a thread that is not in that mode."""
    with torch.inference_mode():
        rows = logits(1).clone()
    sampled = sample(rows, [make(0, [7, 7], logit_bias={9: 100.0}, frequency_penalty=1.0, repetition_penalty=1.2)])
    assert sampled[0].token_id == 9


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_logits_leave_other_rows_their_tokens(value: float, filters: dict[str, Any]) -> None:
    """A row with NaN or infinite logits draws some token, and the other rows of the batch draw theirs."""
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
def test_a_draw_is_where_the_cumulative_sum_passes_the_number(weights: list[float], uniform: float) -> None:
    """A draw is the token where the cumulative sum passes the uniform number, and never a token of weight 0."""
    array = np.array(weights, dtype=np.float32)
    running = array.cumsum(dtype=np.float64)
    token = draw_from(array, uniform)
    assert array[token] > 0
    room = 1e-5 * running[-1]
    assert running[token] >= uniform * running[-1] - room
    assert running[token] - array[token] <= uniform * running[-1] + room


def test_each_token_has_its_share_of_the_numbers() -> None:
    """Each token's interval of uniform numbers begins at its cumulative sum, and a token of weight 0 has none."""
    weights = np.ones(1024, dtype=np.float32)
    for at in (0.0, 0.5):
        assert [draw_from(weights, (token + at) / 1024) for token in range(1024)] == list(range(1024))
    weights[:300] = 0
    assert draw_from(weights, 0.0) == 300


def test_the_largest_number_draws_the_last_token_with_weight() -> None:
    """The largest uniform number below 1 draws the last token with weight, even where block sums are rounded up."""
    for seed in range(50):
        weights = np.random.default_rng(seed).random(300, dtype=np.float32)
        weights[150:] = 0
        assert draw_from(weights, float(np.nextafter(1, 0))) == 149


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 2000])
def test_every_token_that_passes_the_filters_can_be_drawn(temperature: float, top_k: int) -> None:
    """The candidates of all filters together are those of a slow reference, for every combination of the filters."""
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


def test_top_k_keeps_k_tokens_across_a_gap() -> None:
    """`top_k` keeps k tokens even where two of them lie far apart."""
    weights = np.array([1.0, 0.5, 0.005, 0.004, 0.003], dtype=np.float32)
    params = SamplingParams(max_tokens=1, top_k=3)
    assert _candidates(weights, float(weights.sum()), params)[:3].tolist() == [0, 1, 2]


def test_equal_tokens_are_ordered_by_id_and_pass_min_p_together() -> None:
    """Equal weights are ordered by token id, and a token exactly at the min_p limit is kept, as in transformers."""
    weights = np.array([0.5, 1.0, 1.0, 0.5, 0.1], dtype=np.float32)
    for min_p, kept in ((0.5, [1, 2, 0, 3]), (1.0, [1, 2])):
        params = SamplingParams(max_tokens=1, min_p=min_p)
        candidates = _candidates(weights, float(weights.sum()), params)
        assert candidates[: len(_filter(weights[candidates], float(weights.sum()), params))].tolist() == kept


def test_min_p_applies_after_top_p() -> None:
    """The filters apply as in transformers: top_k, then top_p of its mass, then min_p."""
    weights = np.array([1.0] + [0.05] * 9 + [0.009] * 200, dtype=np.float32)
    params = SamplingParams(max_tokens=1, top_k=200, top_p=0.6, min_p=0.01)
    mass = float(weights.sum())

    assert len(_filter(weights[_candidates(weights, mass, params)], mass, params)) == 10
