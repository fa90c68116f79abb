"""Random requests, preemptions, aborts, faults of disks and threads, and restarts: no number is ever wrong."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefix_store.store.config import StoreConfig
from tests.prefix_store.connectors.paged_engine.engine import PagedEngine, Request, Setup, Status, paged_engine
from tests.prefix_store.connectors.paged_engine.toy_model import BLOCK, VOCABULARY, answer_of
from tests.prefix_store.connectors.paged_engine.workers import Memory

_OPERATIONS = 300
_LONGEST = 60
_MEMORIES: tuple[Memory, ...] = ("one", "layers", "device")


class Driver:
    """Does random things to one engine after another, over one folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.choose = random.Random(seed)  # noqa: S311  # reproducible
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._known: list[tuple[str | None, list[int]]] = [(None, self._tokens(20))]
        """Salts and tokens of requests."""
        self._pipes: list[Path] = []
        self._asked = 0

    def live(self, setup: Setup, operations: int) -> None:
        """An engine from start to end."""
        with paged_engine(setup, self.choose) as engine:
            is_alive = True
            for _ in range(operations):
                is_alive &= self._operate(engine)
            self._release_pipes()
            if self.choose.random() < 0.7:  # else the engine ends with requests under way
                engine.run()
                self._judge(engine, is_alive)
            self._count(engine)

    def replay(self, setup: Setup) -> None:
        """Every sequence of tokens again, with what is stored."""
        with paged_engine(setup, self.choose) as engine:
            for salt, tokens in self._known:
                request = engine.ask(tokens, max_tokens=1, cache_salt=salt)
                self.counts["replayed from the store"] += bool(request.loaded)

    def _operate(self, engine: PagedEngine) -> bool:
        """Returns whether the store's threads are still there."""
        operation = self.choose.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        operation(self, engine)
        return operation is not Driver._kill

    def _add(self, engine: PagedEngine) -> None:
        self._asked += 1
        salt, tokens = self.choose.choice(self._known[-12:])
        length = min(len(tokens), BLOCK * self.choose.randrange(12) + self.choose.choice((-1, 0, 0, 1)))
        prompt = tokens[: max(0, length)] + self._tokens(self.choose.choice((0, 1, BLOCK - 1, BLOCK, 9)))
        prompt = prompt[: _LONGEST - 12] or self._tokens(1)
        if self.choose.random() < 0.2:
            salt = self.choose.choice((None, "one", "other"))
        request = Request(str(self._asked), prompt, self.choose.randrange(1, 12), salt)
        if self.choose.random() < 0.05:
            request.lora_request = "an adapter"
        elif self.choose.random() < 0.1:
            offset = self.choose.randrange(len(prompt))
            request.mm_features = [SimpleNamespace(mm_position=SimpleNamespace(offset=offset))]
        engine.add(request)
        self._known.append((salt, prompt + answer_of(engine.setup.seed, prompt, request.max_tokens)))

    def _step(self, engine: PagedEngine) -> None:
        if engine.has_work:
            engine.step()

    def _abort(self, engine: PagedEngine) -> None:
        if engine.requests:
            request = self.choose.choice(list(engine.requests.values()))
            self.counts[f"abort {request.status.value}"] += 1
            engine.abort(request.request_id)

    def _preempt(self, engine: PagedEngine) -> None:
        engine.preempt()

    def _reset(self, engine: PagedEngine) -> None:
        engine.reset(preempts=self.choose.random() < 0.5, forgets=False)

    def _forget(self, engine: PagedEngine) -> None:
        self.counts["forget"] += 1
        engine.reset(forgets=True)

    def _flip(self, engine: PagedEngine) -> None:
        with contextlib.suppress(FileNotFoundError):  # it was evicted meanwhile
            if file := self._file():
                held = bytearray(file.read_bytes())
                held[self.choose.randrange(len(held))] ^= 1 << self.choose.randrange(6)
                file.write_bytes(held)
                self.counts["flip"] += 1

    def _remove(self, engine: PagedEngine) -> None:
        """One part of a block, of one rank."""
        if file := self._file():
            file.unlink(missing_ok=True)
            self.counts["remove"] += 1

    def _pipe(self, engine: PagedEngine) -> None:
        """A file hangs whoever opens it."""
        if len(self._pipes) < 2 and (file := self._file()):
            made = self._folder.parent / "pipe"
            os.mkfifo(made)
            made.replace(file)  # at once: a thread of the store may write the file again whenever it is away
            self._pipes.append(file)
            self.counts["pipe"] += 1

    def _kill(self, engine: PagedEngine) -> None:
        self.choose.choice(engine.workers.ranks).kill_thread()
        self.counts["kill"] += 1

    def _file(self) -> Path | None:
        files = sorted(file for file in self._folder.glob("blocks/*/*") if file.is_file())
        return self.choose.choice(files) if files else None

    def _release_pipes(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
            pipe.unlink(missing_ok=True)
        self._pipes.clear()

    def _tokens(self, count: int) -> list[int]:
        return [self.choose.randrange(VOCABULARY) for _ in range(count)]

    def _judge(self, engine: PagedEngine, is_alive: bool) -> None:
        preempted = sum(request.preemptions for request in engine.done)
        for request in engine.done:
            expected = answer_of(engine.setup.seed, request.prompt, request.max_tokens)
            assert request.status is Status.FINISHED
            assert request.answer == (expected[: len(request.answer)] if request.is_aborted else expected)
        sides = [rank.side for rank in engine.workers.ranks]
        handled = sum(side.figures.dropped + side.opened.store.figures.offered for side in sides)
        assert handled <= engine.planned_saves
        assert handled == engine.planned_saves or preempted or not is_alive

    def _count(self, engine: PagedEngine) -> None:
        """Notes what has happened, so that a test in which nothing did fails."""
        requests = [*engine.done, *engine.requests.values()]
        self.counts["preempted"] += sum(request.preemptions for request in requests)
        self.counts["loaded"] += sum(bool(request.loaded) for request in requests)
        self.counts["saved"] += engine.planned_saves


_WEIGHTS: dict[Callable[[Driver, PagedEngine], None], float] = {
    Driver._add: 24,
    Driver._step: 100,
    Driver._abort: 5,
    Driver._preempt: 5,
    Driver._reset: 1,
    Driver._forget: 0.3,
    Driver._flip: 3,
    Driver._remove: 3,
    Driver._pipe: 0.3,
    Driver._kill: 0.15,
}
"""How often each is done."""


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(tmp_path: Path, seed: int) -> None:
    """Each number that is read is compared with what is computed, and free blocks with what they were.

    All requests end with the right answer, and their blocks are freed exactly once.
    """
    driver = Driver(tmp_path / "kv", seed)
    choose = driver.choose

    def setup() -> Setup:
        config = StoreConfig(memory_bytes=choose.choice((0, 8_000)), disk=tmp_path / "kv", disk_bytes=2**18)
        return Setup(
            config,
            blocks=choose.choice((24, 40)),
            ranks=1 + seed % 2,
            depth=1 + seed // 2 % 2,
            shares=choose.random() < 0.5,
            step_tokens=choose.choice((8, 32)),
            memory=choose.choice(_MEMORIES),
            asks_ahead=choose.random() < 0.6,
        )

    for _ in range(3):
        driver.live(setup(), _OPERATIONS)
    driver.replay(setup())
    for what in ("preempted", "saved", "replayed from the store"):
        assert driver.counts[what], f"nothing was {what}"
