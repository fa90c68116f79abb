"""Traces that tests make."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.commands.route import LruCache
from gateway.commands.simulation.figures import Figures, Fleet
from gateway.commands.simulation.run import Death, Options, Result, simulate
from gateway.commands.simulation.traffic import Request
from gateway.routing.strategies.load import LeastConnections

BLOCK_TOKENS = 512


Question = Callable[[int, random.Random], tuple[int, int, int]]


def poisson(rate: float, seconds: float, question: Question) -> list[Request]:
    """Requests with exponential gaps; `question` gives the identity, prompt and answer tokens of each by its number."""
    chance = random.Random(7)  # noqa: S311  # the same in every run
    requests: list[Request] = []
    time = 0.0
    while (time := time + chance.expovariate(rate)) < seconds:
        identity, prompt, answer = question(len(requests), chance)
        keys = [identity * 64 + block for block in range(-(-prompt // BLOCK_TOKENS))]
        requests.append(Request(time, identity, prompt, answer, keys))
    return requests


def at(*times: float, identity: int = 1, prompt: int = 512, answer: int = 10) -> list[Request]:
    """The same question at these times."""
    return [Request(time, identity, prompt, answer, [identity]) for time in times]


def simulated(
    requests: Sequence[Request],
    fleet: Fleet,
    figures: Figures = Figures(),  # noqa: B008  # frozen
    options: Options = Options(warm_up=0.0),  # noqa: B008  # frozen
    *deaths: Death,
) -> Result:
    """What a fleet does with them, whose gateways take the backend with the fewest requests."""
    return simulate(
        requests, BLOCK_TOKENS, fleet, figures, LeastConnections, lambda: LruCache(fleet.blocks), options, deaths
    )


def write_mooncake(file: Path, requests: int = 200, gap: float = 0.5) -> Path:
    """A file in Mooncake's form: conversations of four turns, two blocks more each time."""
    lines = []
    for number in range(requests):
        conversation, turn = divmod(number, 4)
        blocks = [conversation * 100 + block for block in range(2 * (turn + 1))]
        lines.append(
            json.dumps(
                {
                    "timestamp": 1000 * gap * number,
                    "input_length": BLOCK_TOKENS * len(blocks),
                    "output_length": 40,
                    "hash_ids": blocks,
                }
            )
        )
    file.write_text("\n".join(lines))
    return file
