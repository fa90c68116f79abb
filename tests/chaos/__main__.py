"""`python -m tests.chaos [--seconds S] [WORDS …]`: try faults under load, those whose names contain the words.

Prints a table; status 1 if there is a problem.
"""

import argparse
import asyncio
import sys
from itertools import groupby

from tests.chaos import machine_faults, process_faults, redis_faults, upstream_faults
from tests.chaos.fault import Fault, Trial, shown, trials
from tests.chaos.machine import CannotStage
from tests.chaos.stage import open_stage

FAULTS: tuple[Fault, ...] = (
    *upstream_faults.FAULTS,
    *redis_faults.FAULTS,
    *process_faults.FAULTS,
    *machine_faults.FAULTS,
)
_CLIENTS = 32
_PAUSE = 0.05


async def try_all(faults: list[Fault], seconds: float, clients: int = _CLIENTS) -> tuple[list[Trial], list[str]]:
    """Try them one after the other, each for so long and under so many clients, those of one setting on one stage.

    Returns what was tried, and what is missing for the others.
    """
    done: list[Trial] = []
    missing: list[str] = []
    for setting, group in groupby(sorted(faults, key=lambda fault: fault.setting), lambda fault: fault.setting):
        wanted = list(group)
        try:
            async with open_stage(setting) as stage, trials(stage, clients, _PAUSE) as each:
                for fault in wanted:
                    done.append(await each.run(fault, seconds))
                    print(f"{fault.name}: {len(done[-1].problems)} problems", file=sys.stderr, flush=True)
        except CannotStage as reason:
            missing.append(f"{', '.join(fault.name for fault in wanted)}: {reason}")
        except AssertionError as fault:  # of the end of a gateway, which must leave nothing behind
            if not done or done[-1].fault is not wanted[-1]:
                raise
            done[-1].problems.append(f"at the end of the gateways: {fault or 'something is left behind'}")
    return done, missing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("words", nargs="*", help="of names of faults; without any, all are tried")
    parser.add_argument("--seconds", type=float, default=6.0, help="for which a fault lasts")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if all(word in fault.name for word in given.words)]
    done, missing = asyncio.run(try_all(faults, given.seconds))
    print(shown(done))
    for reason in missing:
        print(f"Not tried: {reason}")
    return int(any(trial.problems for trial in done))


if __name__ == "__main__":
    sys.exit(main())
