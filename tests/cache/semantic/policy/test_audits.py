"""Audits go where doubt is, and never over what the operator allows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.policy.audits import AuditLoad
from tests.cache.semantic.policy.streams import dice


def drawn(load: AuditLoad, risks: list[float | None]) -> list[tuple[float, bool]]:
    """The chance and the draw of each request; a risk of None is a miss."""
    draws = []
    for risk in risks:
        load.request()
        audited, chance = (False, 0.0) if risk is None else load.draw(risk)
        draws.append((chance, audited))
    return draws


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
    st.lists(st.one_of(st.none(), st.floats(0.0, 0.5)), min_size=1, max_size=60),
    st.integers(0, 5),
)
def test_no_window_has_more_audits_than_the_share_and_a_few(
    share: float, pattern: list[float | None], seed: int
) -> None:
    """Over any n requests, whatever comes: share * n, and 2 or what 500 requests bring."""
    draws = [audited for _, audited in drawn(AuditLoad(share, dice(seed)), (pattern * 1000)[:1000])]
    spare = max(2.0, share * 500)
    # The fullest window is where the audits so far exceed the share so far by most, after they did by least.
    least = excess = 0.0
    for audited in draws:
        excess += audited - share
        assert excess - least <= spare + 1e-6
        least = min(least, excess)


@pytest.mark.parametrize("hits", [0.05, 0.4, 1.0])
def test_the_share_is_used_up(hits: float) -> None:
    """Whether there are many hits or few; where the hits are fewer than the audits could be, all are audited."""
    chance = dice(4)
    risks = [chance.choice([0.001, 0.01, 0.05]) if chance.random() < hits else None for _ in range(20_000)]
    share = sum(audited for _, audited in drawn(AuditLoad(0.02, dice(1)), risks)) / len(risks)
    assert 0.016 <= share <= 0.0202


def test_the_doubtful_are_audited_more_often() -> None:
    """Yet the others too, so that no audit has to stand for very many."""
    chance = dice(4)
    risks: list[float | None] = [chance.choice([0.0001, 0.04]) for _ in range(20_000)]
    draws = drawn(AuditLoad(0.02, dice(1)), risks)
    safe, doubtful = (
        sum(audited for (_, audited), r in zip(draws, risks, strict=True) if r == risk) for risk in (0.0001, 0.04)
    )
    assert 1.4 * safe < doubtful < 3 * safe


def test_the_chance_that_is_recorded_is_the_chance() -> None:
    """One over it, summed over what is audited, counts all the hits, though the chances follow what was drawn."""
    totals = []
    for seed in range(30):
        chance = dice(seed)
        risks: list[float | None] = [chance.random() ** 4 if chance.random() < 0.4 else None for _ in range(4000)]
        draws = drawn(AuditLoad(0.05, dice(seed + 100)), risks)
        watched = sum(chance > 0.0 for chance, _ in draws)
        totals.append(sum(1 / chance for chance, audited in draws if audited) / watched)
    assert sum(totals) / len(totals) == pytest.approx(1.0, abs=0.06)
