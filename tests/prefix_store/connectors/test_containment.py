"""A fault of the connector itself costs the blocks of one request: no other, and nobody waits for it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.prefix_store.connectors.conftest import Start
from tests.prefix_store.connectors.paged_engine.engine import PagedEngine, Request
from tests.prefix_store.connectors.paged_engine.prompts import prompt_of
from tests.prefix_store.connectors.paged_engine.toy_model import answer_of


def failing_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which raises at the first call."""
    calls = iter([True])

    def called(*arguments: Any) -> Any:
        if next(calls, False):
            raise RuntimeError("a fault of the test's")
        return method(*arguments)

    return called


def run(engine: PagedEngine, asked: Sequence[Request | list[int]]) -> None:
    """All at once, to their ends; their answers are the model's, and all blocks free again."""
    requests = [
        each if isinstance(each, Request) else Request(f"asked-{place}", each) for place, each in enumerate(asked)
    ]
    for request in requests:
        if request.request_id not in engine.requests:
            engine.add(request)
    engine.run()
    for request in requests:
        assert request.answer == answer_of(1, request.prompt, request.max_tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_load_that_cannot_begin_is_computed(
    start: Start, monkeypatch: pytest.MonkeyPatch, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The other load of its step is done."""
    prompts = [prompt_of(37) for _ in range(2)]
    start().ask(prompts[0])
    start().ask(prompts[1])
    engine = start(depth=depth, shares=False)
    side = engine.workers.ranks[0].side
    monkeypatch.setattr(side._memory, "incoming", failing_once(side._memory.incoming))
    run(engine, prompts)
    assert engine.loads == 2
    assert side.figures.failed_loads == 9
    assert "a fault of the test's" in caplog.text


@pytest.mark.parametrize("depth", [1, 2])
def test_a_save_that_cannot_begin_is_left_out(start: Start, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """The blocks of the other request of its step are stored, and those of both become free."""
    engine = start(depth=depth, shares=False)
    side = engine.workers.ranks[0].side
    monkeypatch.setattr(side._memory, "outgoing", failing_once(side._memory.outgoing))
    prompts = [prompt_of(16) for _ in range(2)]
    run(engine, prompts)
    engine.close()
    later = start(shares=False)
    assert [later.ask(prompt).loaded for prompt in prompts] == [0, 12]


def test_an_audit_that_cannot_begin_is_left_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends all the same."""
    prompt = prompt_of(37)
    start().ask(prompt)
    engine = start(shares=False, audit_every=1)
    side = engine.workers.ranks[0].side
    monkeypatch.setattr(side._memory, "outgoing", failing_once(side._memory.outgoing))
    run(engine, [prompt])
    assert engine.audits == 1
    assert side.figures.audited == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_that_cannot_be_named_is_computed(start: Start, ranks: int) -> None:
    """It waits for no look-up, and is not stored."""
    engine = start(ranks=ranks)
    request = Request("unnamed", prompt_of(37))
    request.all_token_ids = Unreadable(request.all_token_ids)
    run(engine, [request])
    assert engine.planned_saves == 0
    engine.ask(prompt_of(37))
    assert engine.planned_saves == 9 * ranks


def test_an_answer_that_cannot_be_named_is_not_stored(start: Start) -> None:
    """Its prompt is; the request ends, and its blocks become free."""
    engine = start()
    request = engine.add(Request("unnamed", prompt_of(15), max_tokens=4))
    request.all_token_ids = Unreadable(request.all_token_ids)
    run(engine, [request])
    assert engine.planned_saves == 3


class Unreadable(Sequence[int]):
    """Tokens whose slices cannot be read, which is how the connector reads them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice) and place.step is None and place.stop is not None and place.start is not None:
            raise TypeError("a fault of the test's")
        return self._tokens[place]

    def __len__(self) -> int:
        return len(self._tokens)
