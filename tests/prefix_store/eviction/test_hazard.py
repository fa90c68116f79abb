"""The learned policy on streams with learnable reuse."""

import random
from collections.abc import Callable

import pytest

from prefix_store.eviction.access import Access
from prefix_store.eviction.hazard import HazardPolicy
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.tree import BlockTree


def hit_ratio(
    policy: Policy, requests: list[tuple[float, list[int], int]], told_late: bool = False, scale: float = 1.0
) -> float:
    """The block hit ratio of a cache of 200 blocks."""
    tree: BlockTree[int] = BlockTree(200, policy)
    hits = blocks = 0
    running: list[tuple[Access, int]] = []
    for time, keys, output_length in requests:
        access = Access(time * scale, output_length=None if told_late else output_length)
        hits += tree.lookup(keys)
        blocks += len(keys)
        tree.use(keys, access)
        if told_late:
            running.append((access, output_length))
            if len(running) > 5:
                done, length = running.pop(0)
                done.end(length)
    assert tree.problems() == []
    return hits / blocks


def mixed_traffic() -> list[tuple[float, list[int], int]]:
    """Chains with short answers are used again after a minute, those with long ones never."""
    draw = random.Random(3)  # noqa: S311  # not a secret
    requests: list[tuple[float, list[int], int]] = []
    for number in range(1_500):
        keys = [100 * number + block for block in range(10)]
        if draw.random() < 0.3:
            requests += [(2.0 * number + 60.0 * turn, keys, 10) for turn in range(3)]
        else:
            requests.append((2.0 * number, keys, 1_000))
    return sorted(requests)


@pytest.mark.parametrize("told_late", [False, True])
def test_it_learns_which_requests_come_back(told_late: bool) -> None:
    """If the length of the last answer predicts reuse, the hit ratio is far above that of LRU."""
    learned = hit_ratio(HazardPolicy(), mixed_traffic(), told_late)
    assert learned > 1.5 * hit_ratio(LeastRecentlyUsed(), mixed_traffic(), told_late)


def test_a_loop_that_does_not_fit_is_kept_in_part() -> None:
    """On a cycle a little longer than the capacity LRU has no hits; the index keeps most of it."""
    loop = [(float(number), [number % 30 * 100 + block for block in range(10)], 10) for number in range(3_000)]
    assert hit_ratio(LeastRecentlyUsed(), loop) == 0.0
    assert hit_ratio(HazardPolicy(), loop) > 0.4


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e6])
def test_the_unit_of_time_may_be_anything(scale: float) -> None:
    """With all uses at one time, or years apart, the hit ratio is at most .02 below that of LRU."""
    reference = hit_ratio(LeastRecentlyUsed(), mixed_traffic(), scale=scale)
    assert hit_ratio(HazardPolicy(), mixed_traffic(), scale=scale) > reference - 0.02


def test_the_same_seed_evicts_the_same() -> None:
    """Two policies with one seed choose the same victims, another seed chooses others."""

    def victims(seed: int) -> list[int]:
        tree: BlockTree[int] = BlockTree(1_000, HazardPolicy(seed))
        return [key for time, keys, out in mixed_traffic() for key in tree.use(keys, Access(time, output_length=out))]

    assert victims(7) == victims(7) != victims(8)


@pytest.mark.parametrize("make", [LeastRecentlyUsed, HazardPolicy])
def test_an_access_that_ends_after_its_blocks_have_gone_is_no_fault(make: Callable[[], Policy]) -> None:
    """An access may end after its blocks were removed, or used by other requests."""
    tree: BlockTree[str] = BlockTree(2, make(), remembered=0.0)
    early, other = Access(1.0), Access(2.0)
    tree.use(["a", "b"], early)
    tree.use(["a", "c"], other)
    tree.remove("a")
    early.end(5)
    other.end(0)
    assert tree.problems() == []


def test_an_answer_has_one_length() -> None:
    """A negative length is refused; of two lengths the first one counts."""
    access = Access(1.0)
    with pytest.raises(ValueError, match="-1"):
        access.end(-1)
    access.end(5)
    access.end(6)
    assert access.output_length == 5
