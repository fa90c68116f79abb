"""Audits: what is stored is compared with what is computed, and removed where it differs."""

import pytest

from tests.prefix_store.connectors.conftest import Start
from tests.prefix_store.connectors.paged_engine.engine import Request, Status
from tests.prefix_store.connectors.paged_engine.faults import files_of
from tests.prefix_store.connectors.paged_engine.prompts import prompt_of


@pytest.mark.parametrize("memory", ["one", "layers", "device"])
def test_a_prefix_is_computed_and_compared(start: Start, memory: str) -> None:
    """One in so many that could be loaded; the others are."""
    engine = start(audit_every=3, shares=False, memory=memory)
    prompt = prompt_of(21)
    engine.ask(prompt)
    assert [engine.ask(prompt).loaded for _ in range(6)] == [20, 20, 0, 20, 20, 0]
    assert engine.workers.ranks[0].side.audits() == {"audited": 2, "drifted": 0, "void": 0, "largest_error": 0.0}


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_models_numbers_are_found_and_removed(start: Start, ranks: int) -> None:
    """Frames that are whole, under the right names, and wrong."""
    prompt = prompt_of(21)
    start(seed=2, claimed_seed=1, ranks=ranks).ask(prompt)
    engine = start(audit_every=1, shares=False, ranks=ranks)
    assert engine.ask(prompt).loaded == 0
    for rank in engine.workers.ranks:
        assert rank.side.audits()["drifted"] == 1
        assert rank.side.figures.largest_error > 0.05
    engine.ask(prompt)  # is stored again
    engine.ask(prompt)
    for rank in engine.workers.ranks:
        assert (rank.side.figures.audited, rank.side.figures.drifted) == (2, 1)


def test_without_an_audit_they_would_be_used(start: Start) -> None:
    """The simulated engine notices: it compares what it reads."""
    prompt = prompt_of(21)
    start(seed=2, claimed_seed=1).ask(prompt)
    engine = start()
    with pytest.raises(AssertionError, match=r"numbers of tokens .* are wrong"):
        engine.ask(prompt)


def test_blocks_that_have_gone_cannot_be_compared(start: Start) -> None:
    """The audit counts as void."""
    prompt = prompt_of(21)
    start().ask(prompt)
    engine = start(audit_every=1, shares=False)
    request = engine.add(Request("one", prompt))
    while not request.answer:
        engine.step()
    for file in files_of(engine, prompt):
        file.unlink()
    engine.run()
    assert engine.workers.ranks[0].side.audits() == {"audited": 1, "drifted": 0, "void": 1, "largest_error": 0.0}


def test_the_computed_part_of_an_aborted_prompt_is_compared(start: Start) -> None:
    """Blocks that were not computed are not."""
    prompt = prompt_of(61)
    start().ask(prompt)
    engine = start(audit_every=1, shares=False, step_tokens=16)
    request = engine.add(Request("one", prompt))
    while request.num_computed_tokens < 32:
        engine.step()
    engine.abort("one")
    engine.run()
    assert engine.workers.ranks[0].side.audits() == {"audited": 1, "drifted": 0, "void": 0, "largest_error": 0.0}


def test_an_audit_of_a_store_that_has_ended_is_skipped(start: Start) -> None:
    """The request ends all the same."""
    prompt = prompt_of(21)
    start().ask(prompt)
    engine = start(audit_every=1, shares=False)
    request = engine.add(Request("one", prompt))
    while request.status is not Status.RUNNING:
        engine.step()
    engine.workers.ranks[0].side.close()
    engine.run()
    assert engine.audits == 1
    assert engine.workers.ranks[0].side.figures.audited == 0
