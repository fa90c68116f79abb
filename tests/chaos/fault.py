"""What a fault is, what requests may meet while it lasts, and how one is tried.

    load ──────────────────────────────────────────────────────────────────►
          before │ the fault │ until all is well again │ after
                 ▲           ▲                         ▲
           it is injected   it is gone          within RECOVERY seconds

Outside of the middle two, every answer must be right. Within them a request may meet what the fault allows and
nothing else. At no time may an answer be wrong, or later than its deadline by more than the machine stood still; and
a request during which it stood still may be told that time is up.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from tests.chaos.load import HASTY, Kind, Load, ModelLoad, Outcome
from tests.chaos.stage import Setting, Stage
from tests.waiting import until

RECOVERY = 10.0
"""Seconds within which all must be well again."""
_RIGHT_IN_A_ROW = 30
_UNDISTURBED = 0.3
_SHOWN_PROBLEMS = 8
# What is stored takes milliseconds.
_SLOW_HIT = 0.2
# As many as a model answers in time on two cores.
_MODEL_CLIENTS = 4


@dataclass(frozen=True, slots=True)
class Fault:
    """`hold` keeps the fault up while its block runs."""

    name: str
    hold: Callable[[Stage], AbstractAsyncContextManager[None]]
    refused: frozenset[int] = frozenset()
    """Statuses of errors that requests may get. Hot questions, which are stored, may get none."""
    hangs: bool = False
    """Whether a hasty client may be told that its deadline has ended."""
    told: bool = False
    """Whether streams that had begun may end with an error in their own form."""
    cut: bool = False
    """Whether connections to the gateway may break, of requests under way when it begins."""
    continued: frozenset[int] = frozenset()
    """Statuses that requests may get which continue a stored conversation."""
    least: float = 0.8
    """Seconds that it takes to show."""
    settling: float = 0.0
    """Seconds until what it has broken is found to be whole again at most; as long as it was broken if that is less."""
    setting: Setting = "plain"


@dataclass(slots=True)
class Trial:
    """What requests met while a fault was tried. Times are monotonic."""

    fault: Fault
    outcomes: list[Outcome]
    injected: float
    gone: float
    well: float
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Note as problems what should not have been."""
        for outcome in self.outcomes:
            problem = self._problem_of(outcome)
            if problem:
                when = outcome.began - self.injected
                took, stalled = outcome.ended - outcome.began, outcome.stalled
                times = f"began {when:+.2f} s, took {took:.2f} s, of which the load stood still {stalled:.2f} s"
                self.problems.append(f"{problem}: {outcome.ask} ({times})")

    def _problem_of(self, outcome: Outcome) -> str:
        if outcome.kind is Kind.WRONG:
            return f"wrong: {outcome.detail}"
        if outcome.is_late:
            return f"late: {outcome.detail or outcome.kind.value}"
        if outcome.kind in (Kind.RIGHT, Kind.LEFT) or outcome.is_out_of_time:
            return ""
        if outcome.ask.deadline == HASTY and outcome.kind is not Kind.CUT and self._was_busy(outcome):
            return ""
        during = outcome.ended > self.injected and outcome.began < self.well
        fault = self.fault
        is_hasty = fault.hangs and outcome.ask.deadline == HASTY
        allowed = fault.refused | (fault.continued if outcome.ask.is_continued else frozenset())
        # Its conversation cannot be read until Redis is there again, for which it is too hasty.
        is_waiting = bool(fault.continued) and outcome.ask.is_continued and outcome.ask.deadline == HASTY
        if is_hasty or is_waiting:
            allowed |= {504}
        may = {
            Kind.TOLD: fault.told or is_hasty,
            Kind.REFUSED: not outcome.ask.is_hot and outcome.status in allowed,
            # Connections are made until the system knows that nobody takes them any more.
            Kind.CUT: fault.cut and outcome.began < self.injected + 1.0,
        }[outcome.kind]
        return "" if during and may else f"{outcome.kind.value} {outcome.detail}"

    def _was_busy(self, outcome: Outcome) -> bool:
        """Whether the machine had so much else to do meanwhile that even what is stored took long."""
        return any(
            other.ask.is_hot
            and other.ended - other.began > _SLOW_HIT
            and other.began < outcome.ended
            and other.ended > outcome.began
            for other in self.outcomes
        )

    def row(self) -> list[str]:
        kinds = Counter(outcome.kind for outcome in self.outcomes)
        codes = Counter(outcome.detail.partition(":")[0] for outcome in self.outcomes if outcome.kind is Kind.REFUSED)
        refused = ", ".join(f"{count} x {code}" for code, count in codes.most_common())
        return [
            self.fault.name,
            str(len(self.outcomes)),
            str(kinds[Kind.RIGHT]),
            str(kinds[Kind.TOLD]),
            str(kinds[Kind.CUT]),
            str(kinds[Kind.LEFT]),
            refused or "0",
            str(kinds[Kind.WRONG]),
            str(sum(outcome.is_late for outcome in self.outcomes)),
            f"{self.well - self.gone:.1f}",
        ]


HEADINGS = ("fault", "requests", "right", "told", "cut", "left", "refused", "wrong", "late", "well after s")


class Trials:
    """Tries faults on a stage under load."""

    def __init__(self, stage: Stage, load: Load, outcomes: list[Outcome]) -> None:
        self._stage = stage
        self._load = load
        self._outcomes = outcomes

    async def run(self, fault: Fault, seconds: float) -> Trial:
        """Hold the fault for some seconds, or `fault.least` if that is more."""
        self._outcomes.clear()
        await asyncio.sleep(seconds / 4)
        injected = time.monotonic()
        async with fault.hold(self._stage):
            await asyncio.sleep(max(seconds, fault.least))
        gone = time.monotonic()
        trial = Trial(fault, self._outcomes, injected, gone, gone)
        settled = gone + min(fault.settling, gone - injected)
        await asyncio.sleep(settled - gone)
        try:
            await until(lambda: self._is_well(gone), RECOVERY, every=0.02)
        except TimeoutError:
            trial.problems.append(f"not all is well {RECOVERY:g} s after the fault")
        trial.well = max(self._well_since(gone), settled)
        await asyncio.sleep(seconds / 4)
        trial.outcomes = list(self._outcomes)
        trial.judge()
        return trial

    def _well_since(self, gone: float) -> float:
        """When the last request that met the fault ended."""
        met = (o.ended for o in self._outcomes if o.kind not in (Kind.RIGHT, Kind.LEFT) and o.ended > gone)
        return max(met, default=gone)

    def _is_well(self, gone: float) -> bool:
        """Whether nothing of before is under way, and what began since the last failure is right."""
        since = self._well_since(gone)
        right = sum(outcome.kind is Kind.RIGHT and outcome.began >= since for outcome in self._outcomes)
        is_quiet = time.monotonic() - since >= _UNDISTURBED
        return is_quiet and right >= _RIGHT_IN_A_ROW and all(began >= gone for began in self._load.pending.values())


@asynccontextmanager
async def trials(stage: Stage, clients: int, pause: float) -> AsyncIterator[Trials]:
    """Load on a stage, and what tries faults meanwhile."""
    outcomes: list[Outcome] = []
    load = Load(stage.tenants, outcomes.append)
    if stage.model:
        load, clients = ModelLoad(stage.tenants, outcomes.append, stage.model), _MODEL_CLIENTS
    await load.warm_up()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(load.run(clients, pause))
        try:
            yield Trials(stage, load, outcomes)
        finally:
            running.cancel()


def shown(trials: list[Trial]) -> str:
    """The table of what happened, and the problems."""
    rows = [list(HEADINGS), *(trial.row() for trial in trials)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(
            text.ljust(width) if HEADINGS[column] in ("fault", "refused") else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    for trial in trials:
        if trial.problems:
            lines += ["", f"{trial.fault.name}: {len(trial.problems)} problems"]
            lines += [f"  {problem}" for problem in trial.problems[:_SHOWN_PROBLEMS]]
    return "\n".join(lines)
