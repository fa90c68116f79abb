"""Load that is made of a trace."""

from collections import Counter
from pathlib import Path

import pytest

from gateway.commands.simulation.traffic import Traffic, requests
from prefix_store.replay.read import read_trace
from prefix_store.replay.trace import Trace, TraceRequest
from tests.gateway.commands.simulation.traces import write_mooncake


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return read_trace(write_mooncake(tmp_path / "trace.jsonl"))


def test_one_copy_is_the_trace(trace: Trace) -> None:
    """Its times, lengths and blocks."""
    made = [(r.time, r.input_length, r.output_length, list(r.keys)) for r in requests(trace, Traffic())]
    assert made == [(r.time, r.input_length, r.output_length, list(r.keys)) for r in trace.requests()]


def test_it_comes_faster(trace: Trace) -> None:
    """By the rate."""
    times = [request.time for request in requests(trace, Traffic(rate=4.0))]
    assert times == [pytest.approx(request.time / 4) for request in trace.requests()]


def test_copies_share_no_prompt(trace: Trace) -> None:
    """Each is the whole trace, begun at another place, in blocks and questions of its own."""
    made = list(requests(trace, Traffic(copies=3)))
    assert len(made) == 3 * trace.count
    assert [request.time for request in made] == sorted(request.time for request in made)
    ends = Counter((request.keys[-1], request.input_length) for request in made)
    recorded = Counter((request.keys[-1], request.input_length) for request in trace.requests())
    assert len(ends) == 3 * len(recorded)
    assert len({request.identity for request in made}) == len(ends)
    assert len({request.keys[0] for request in made[:3]}) == 3


def test_a_share_asks_again(trace: Trace) -> None:
    """What was asked before; a few questions more often than most."""
    made = list(requests(trace, Traffic(copies=10, repeats=0.5)))
    times = Counter(request.identity for request in made)
    assert 1 - len(times) / len(made) == pytest.approx(0.5, abs=0.03)
    assert times.most_common(1)[0][1] > 10


def test_load_ends_when_asked(trace: Trace) -> None:
    """After so many seconds."""
    made = list(requests(trace, Traffic(copies=2, seconds=10.0)))
    assert 0 < len(made) < trace.count
    assert made[-1].time < 10


def test_equal_prompts_are_the_same_question() -> None:
    """Of the same blocks and length; where prefixes are not known no two are."""
    same = TraceRequest(0.0, 600, 1, [1, 2])
    known = Trace("test", 512, 3, lambda: iter([same, same, same._replace(input_length=601)]))
    first, again, longer = (request.identity for request in requests(known, Traffic()))
    assert first == again != longer
    unknown = Trace("test", 512, 2, lambda: iter([same._replace(keys=[])] * 2), has_prefixes=False)
    assert len({request.identity for request in requests(unknown, Traffic())}) == 2
