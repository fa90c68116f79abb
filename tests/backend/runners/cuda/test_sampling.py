"""Sampling on the device against sorting and summing in torch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.kernels.sampling import sample_tokens
from tests.backend.runners.cuda.examples import FEW
from tests.backend.runners.cuda.references import kept_tokens

DRAWS = 60


def sampled(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: list[int] | None = None,
    counter: int = 0,
) -> list[int]:
    """Tokens of all rows under the same parameters."""
    rows = logits.shape[0]
    tokens = sample_tokens(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.tensor(seeds or list(range(rows))),
        torch.full((rows,), counter, dtype=torch.int32),
    )
    chosen: list[int] = tokens.tolist()
    return chosen


def random_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@given(vocabulary=st.integers(1, 9000), seed=st.integers(0, 99))
@FEW
def test_temperature_zero_is_argmax(vocabulary: int, seed: int) -> None:
    """Temperature 0 draws the most likely token, and the first of equal ones."""
    logits = random_logits(2, vocabulary, seed)
    assert sampled(logits, temperature=0.0) == logits.argmax(-1).tolist()
    logits[:, seed % vocabulary :] = 20.0
    assert sampled(logits, temperature=0.0) == [seed % vocabulary] * 2


@given(
    vocabulary=st.integers(2, 5000),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 6000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 99),
)
@FEW
def test_only_kept_tokens_are_drawn(
    vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """A draw is never a token that the filters leave out."""
    logits = random_logits(1, vocabulary, seed)
    kept = kept_tokens(logits[0], temperature, top_k, top_p, min_p)
    assert kept[sampled(logits, temperature, top_k, top_p, min_p, seeds=[seed])]


def test_draws_follow_the_probabilities() -> None:
    """Draws follow the probabilities in a chi-squared test, also behind a token of probability 0."""
    logits = torch.tensor([2.0, 1.0, 1.5, float("-inf"), 1.7])
    drawn = torch.bincount(torch.tensor(sampled(logits.repeat(DRAWS, 1))), minlength=5).double()
    expected = logits.double().softmax(-1) * DRAWS
    assert drawn[3] == 0
    distance = ((drawn - expected).square() / expected)[[0, 1, 2, 4]].sum()
    assert distance < 16.3  # three degrees of freedom: exceeded for one seed in a thousand


def test_a_draw_depends_on_its_row_alone() -> None:
    """A draw depends on the row, its seed and its counter alone."""
    row = random_logits(1, 5000, 5)
    batch = torch.cat([random_logits(2, 5000, 6), row])
    assert sampled(row, seeds=[77]) == sampled(batch, seeds=[1, 2, 77])[2:]
    flat = torch.zeros(1, 5000)
    draws = {tuple(sampled(flat, seeds=[seed], counter=counter)) for seed in (1, 2**40 + 1) for counter in (0, 1)}
    assert len(draws) == 4


def test_a_nan_row_draws_minus_one() -> None:
    """A row with NaN draws -1, and the other rows draw what they draw without it."""
    logits = random_logits(3, 300, 7)
    healthy = sampled(logits)
    logits[1, 250] = float("nan")
    assert sampled(logits) == [healthy[0], -1, healthy[2]]
    assert sampled(logits, temperature=0.0)[1] == -1


def test_the_smallest_temperature_is_greedy() -> None:
    """The smallest temperature is greedy without overflow, and forbidden tokens stay forbidden."""
    logits = random_logits(2, 500, 8)
    logits[:, 100:] = float("-inf")
    assert sampled(logits, temperature=1e-38) == logits.argmax(-1).tolist()
    assert all(token < 100 for token in sampled(logits, temperature=50.0, top_p=0.999))
