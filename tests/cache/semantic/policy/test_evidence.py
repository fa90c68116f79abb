"""What the neighbours say is weighed: nearness, agreement, and the next other answer."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.policy.policy import NEIGHBOURS, Evidence
from cache.semantic.policy.posterior import FEATURES, evidence_of

NEIGHBOURHOODS = st.lists(st.tuples(st.floats(-1.0, 1.0, width=32), st.integers(0, 4)), min_size=1, max_size=NEIGHBOURS)


def weigh(*neighbours: tuple[float, int]) -> Evidence:
    ordered = sorted(neighbours, key=lambda neighbour: -neighbour[0])
    return evidence_of([(str(answer), similarity) for similarity, answer in ordered])


def test_several_agreeing_neighbours_outvote_a_nearer_one() -> None:
    """The answer of three at .9 is likelier than that of one at .92; it is served from the nearest of the three."""
    evidence = weigh((0.92, 7), (0.9, 3), (0.9, 3), (0.89, 3))
    assert evidence.members == (1, 2, 3)
    assert (evidence.answer, evidence.similarity) == ("3", 0.9)


def test_the_margin_is_to_the_nearest_other_answer() -> None:
    """Not to the nearest neighbour, and negative where that one is nearer."""
    near = weigh((0.9, 1), (0.89, 1), (0.8, 2)).features[2]
    alone = weigh((0.9, 1), (0.89, 1), (0.7, 2)).features[2]
    outdone = weigh((0.91, 2), (0.9, 1), (0.9, 1), (0.9, 1)).features[2]
    assert outdone < 0 < near < alone


def test_a_crowd_that_agrees_says_nothing_of_what_lies_beyond_it() -> None:
    """With as many neighbours as are looked at, another answer may be as near as the last of them."""
    crowd = [(0.9 - place / 100, 1) for place in range(NEIGHBOURS)]
    assert weigh(*crowd).features[2] < weigh(*crowd[:-1]).features[2]


def test_one_distant_neighbour_is_no_majority() -> None:
    """Its share of the votes is small although nobody contradicts; near, it is nearly all."""
    assert weigh((0.4, 1)).features[3] < 0 < weigh((0.9, 1)).features[3]


@given(NEIGHBOURHOODS)
def test_evidence_is_finite_and_names_who_agrees(neighbours: list[tuple[float, int]]) -> None:
    """In any neighbourhood: who is named has one answer, nobody else has it, and no number breaks the posterior."""
    ordered = sorted(neighbours, key=lambda neighbour: -neighbour[0])
    answers = [answer for _, answer in ordered]
    evidence = weigh(*neighbours)
    agreed = answers[evidence.members[0]]
    assert list(evidence.members) == [place for place, answer in enumerate(answers) if answer == agreed]
    assert evidence.features.shape == (FEATURES,)
    assert np.isfinite(evidence.features).all()
    assert evidence.features[4] == math.log(len(evidence.members))


@given(NEIGHBOURHOODS, st.permutations(range(5)))
def test_the_names_of_answers_mean_nothing(neighbours: list[tuple[float, int]], names: list[int]) -> None:
    """Only which are equal counts."""
    renamed = [(similarity, names[answer]) for similarity, answer in neighbours]
    assert np.allclose(weigh(*neighbours).features, weigh(*renamed).features)
