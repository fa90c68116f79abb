"""Mixed load for a given time, and what of it stays: `python -m tests.chaos.soak SECONDS`.

Clients of all kinds ask, some of which leave or read slowly, and one upstream fails now and then. Memory is compared
between the end of the warm-up and the end of the run. When the load has stopped, no request may be counted, and no
connection or file be open, that was not there before. Status 1 if there is a problem.
"""

import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.load import Kind, Load, Outcome
from tests.chaos.stage import Stage, open_stage
from tests.chaos.upstream import BEHAVIOURS
from tests.gateway.processes.serving import Serving, open_files
from tests.waiting import until

GROWTH = 0.03
"""By so much the memory of a process may grow after the warm-up."""
_CLIENTS = 32
_PAUSE = 0.05
# The first answers fill caches, pools and the allocator; later memory is compared.
_WARM_UP = 1 / 3
_LONGEST_WARM_UP = 600.0
_LEAST_COMPARED = 300.0
_SAMPLE_SECONDS = 1.0
# Memory is compared between spans of this share of the time after the warm-up.
_SPAN = 0.15
_WELL_SECONDS, _ILL_SECONDS = 8.0, 2.0
_QUIET_WITHIN = 60.0
# Health checks keep a connection or two to each upstream, and Redis has a pool.
_CHECKING = 2
_POOL = 40
_SHOWN_PROBLEMS = 10
# Faults of one upstream that others make up for, or that streams tell.
_ILLS = tuple(behaviour for behaviour in BEHAVIOURS[1:] if "429" not in behaviour and "noise" not in behaviour)


@dataclass(slots=True)
class Soak:
    """What was seen: resident memory by process over time, kinds of outcomes, and problems."""

    memory: dict[int, list[int]] = field(default_factory=dict)
    kinds: Counter[Kind] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    late: int = 0

    def take(self, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        self.late += outcome.is_late
        if outcome.kind is Kind.WRONG or outcome.is_late:
            self.problems.append(f"{'late' if outcome.is_late else 'wrong'}: {outcome.ask}: {outcome.detail}")
        elif outcome.kind is Kind.CUT or (outcome.kind is Kind.REFUSED and not self._may_be_refused(outcome)):
            self.problems.append(f"{outcome.kind.value}: {outcome.ask}: {outcome.detail}")

    def _may_be_refused(self, outcome: Outcome) -> bool:
        return outcome.is_out_of_time or (outcome.status == 504 and outcome.ask.deadline is not None)

    def growth(self, pid: int) -> float:
        """Of a process, from the first to the last span."""
        samples = self.memory[pid]
        span = max(1, round(len(samples) * _SPAN))
        return statistics.median(samples[-span:]) / statistics.median(samples[:span]) - 1


async def soak(seconds: float) -> Soak:
    """Run the load; memory is compared only in a run that is long enough."""
    seen = Soak()
    async with open_stage("soak") as stage:
        load = Load(stage.tenants, seen.take)
        await load.warm_up()
        warm_up = min(seconds * _WARM_UP, _LONGEST_WARM_UP)
        async with _running(stage, load):
            await asyncio.sleep(warm_up)
        quiet = await _quiet(stage, seen)
        pids = [pid for gateway in stage.gateways for pid in _pids(gateway)]
        seen.memory = {pid: [] for pid in pids}
        end = time.monotonic() + seconds - warm_up
        async with _running(stage, load):
            while time.monotonic() < end:
                for pid in pids:
                    seen.memory[pid].append(_resident(pid))
                await asyncio.sleep(_SAMPLE_SECONDS)
        after = await _quiet(stage, seen)
        for pid, files in after.items():
            if new := files - quiet.get(pid, Counter()):
                seen.problems.append(f"process {pid} has open files that it had not: {dict(new)}")
            if seconds - warm_up >= _LEAST_COMPARED and seen.growth(pid) > GROWTH:
                seen.problems.append(f"process {pid} has grown by {seen.growth(pid):.1%}")
    return seen


@asynccontextmanager
async def _running(stage: Stage, load: Load) -> AsyncIterator[None]:
    """Load, and an upstream that fails now and then."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(load.run(_CLIENTS, _PAUSE)), tasks.create_task(_fail_now_and_then(stage))]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def _fail_now_and_then(stage: Stage) -> None:
    choose = random.Random(1)  # noqa: S311  # reproducible
    while True:
        await asyncio.sleep(_WELL_SECONDS)
        try:
            await stage.one.behave(choose.choice(_ILLS))
            await asyncio.sleep(_ILL_SECONDS)
        finally:
            await asyncio.shield(stage.one.behave("well"))


async def _quiet(stage: Stage, seen: Soak) -> dict[int, Counter[str]]:
    """Wait until nothing is left of the load; returns the files that each process has open."""
    for gateway in stage.gateways:
        try:
            await until(lambda gateway=gateway: _is_idle(stage, gateway), _QUIET_WITHIN, every=0.2)  # type: ignore[misc]
        except TimeoutError:
            left = {pid: dict(_connections(stage, gateway, pid)) for pid in _pids(gateway)}
            seen.problems.append(f"not idle: {await _gauges(gateway)}, connections {left}")
    return {pid: _files(pid) for gateway in stage.gateways for pid in _pids(gateway)}


async def _is_idle(stage: Stage, gateway: Serving) -> bool:
    for pid in _pids(gateway):
        found = _connections(stage, gateway, pid)
        if found["client"] or found["upstream"] > _CHECKING * len(stage.upstreams) or found["other"] > _POOL:
            return False
    return await _gauges(gateway) == {"requests_in_flight": 1.0, "flights": 0.0}  # the one that asks


async def _gauges(gateway: Serving) -> dict[str, float]:
    """The gauges of what is under way, over all workers."""
    figures = {"requests_in_flight": 0.0, "flights": 0.0}
    lines = (await gateway.send("GET", "/metrics")).body.decode().splitlines()
    for line in lines:
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0].removeprefix("keepgate_")
        if name in figures:
            figures[name] += float(value)
    return figures


def _pids(gateway: Serving) -> list[int]:
    """The workers, of which the first is the parent of the others."""
    return [gateway.pid, *(pid for pid, words in gateway.children().items() if "gateway.processes.worker" in words)]


def _resident(pid: int) -> int:
    """Resident set size in pages."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def _files(pid: int) -> Counter[str]:
    """Open files by path, without sockets and pipes."""
    return Counter(path for path in open_files(pid) if path.startswith("/"))


def _connections(stage: Stage, gateway: Serving, pid: int) -> Counter[str]:
    """The open sockets of a process, by whom they lead to."""
    own, upstreams = int(gateway.url.rpartition(":")[2]), {upstream.port for upstream in stage.upstreams}
    kinds: dict[str, str] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *rest = line.split()
        local_port, remote_port = (int(address.rpartition(":")[2], 16) for address in (local, remote))
        is_listening = state == "0A"
        kind = "upstream" if remote_port in upstreams else "client" if local_port == own else "other"
        kinds[rest[5]] = "listening" if is_listening else kind
    found: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                found[kinds.get(target[8:-1], "other")] += 1
    return found


def main() -> int:
    seen = asyncio.run(soak(float(sys.argv[1])))
    counts = ", ".join(f"{count:,} {kind.value}" for kind, count in seen.kinds.most_common())
    print(f"{seen.kinds.total():,} requests: {counts}; {seen.late} late")
    for number, (pid, samples) in enumerate(seen.memory.items()):
        first, last = (samples[place] * os.sysconf("SC_PAGE_SIZE") / 2**20 for place in (0, -1))
        print(f"worker {number}: {first:.1f} MiB after the warm-up, {last:.1f} MiB at the end: {seen.growth(pid):+.1%}")
    for problem in seen.problems[:_SHOWN_PROBLEMS]:
        print(f"PROBLEM {problem}")
    return int(bool(seen.problems))


if __name__ == "__main__":
    sys.exit(main())
