"""Greedy answers to random prompts with each method of drafts, on each runner, against the same without drafts.

    python -m tests.backend.speculation.sameness [PROMPTS]

Prints a table of how many answers are the same, token for token. The status is 1 if one is not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner
from backend.engine.step import Speculator
from backend.speculation.draft_model import DraftModel
from tests.backend.speculation.drafting import VOCABULARY, Foresight, eager, random_heads
from tests.backend.tiny_model import CONFIG, EngineClient, fused, reference

BLOCKS = 80
ANSWER = 24
RUNNERS: Mapping[str, Callable[[], ModelRunner]] = {
    "fused float16": lambda: fused(BLOCKS),
    "fused int8, KV in int8": lambda: fused(BLOCKS, "int8", "int8"),
    "fused int4": lambda: fused(BLOCKS, "int4"),
    "torch float32": lambda: reference(BLOCKS),
}
METHODS = ("prompt-lookup", "prediction", "draft-model", "medusa", "chains at random", "trees at random")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one method on one runner."""

    runner: str
    method: str
    same: int
    answers: int
    accepted: int
    """Tokens of drafts."""


def outcomes(prompts: int, seed: int = 0) -> list[Outcome]:
    """One for each method on each runner."""
    numbers = random.Random(seed)  # noqa: S311
    # Repeated pieces, so that something is found.
    pieces = [[numbers.randrange(10, 140) for _ in range(numbers.randint(2, 12))] for _ in range(40)]
    asked = [[*chain.from_iterable(numbers.choices(pieces, k=numbers.randint(1, 6)))] for _ in range(prompts)]
    found: list[Outcome] = []
    for name, make in RUNNERS.items():
        runner = make()
        plain = _answers(runner, asked, None, {})[0]
        known = {number: prompt + plain[number] for number, prompt in enumerate(asked)}
        for method in METHODS:
            speculator = _speculator(method, known)
            predictions = plain if method == "prediction" else {}
            answers, accepted = _answers(runner, asked, speculator, predictions)
            same = sum(answers[number] == plain[number] for number in plain)
            found.append(Outcome(name, method, same, len(plain), accepted))
    return found


def _speculator(method: str, known: Mapping[int, list[int]]) -> Speculator:
    if method == "draft-model":
        return eager(DraftModel(fused(BLOCKS, "int4"), VOCABULARY))
    if method == "medusa":
        return eager(medusa=random_heads(CONFIG.hidden_size))
    if method.endswith("at random"):
        return Foresight(known, 1, branches=method.startswith("trees"))
    return eager()


def _answers(
    runner: ModelRunner, asked: list[list[int]], speculator: Speculator | None, predictions: Mapping[int, list[int]]
) -> tuple[dict[int, list[int]], int]:
    """Answers by the number of the prompt, of eight at a time, and how many tokens of drafts were accepted."""
    client = EngineClient(Engine(runner, max_batch=8, step_tokens=96, speculator=speculator))
    for number, prompt in enumerate(asked):
        client.submit(number, prompt, ANSWER, logprobs=None, prediction=predictions.get(number, ()))
    client.run()
    accepted = sum(counts.accepted_tokens for counts in client.engine.stats().drafts.values())
    return {n: c.sequence.tokens[c.sequence.num_prompt :] for n, c in client.completions.items()}, accepted


def main() -> int:
    """Prints the table."""
    prompts = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    found = outcomes(prompts)
    print(f"{'runner':26}{'method':20}{'same':>14}{'accepted tokens':>18}")
    for outcome in found:
        same = f"{outcome.same:,} of {outcome.answers:,}"
        print(f"{outcome.runner:26}{outcome.method:20}{same:>14}{outcome.accepted:>18,}")
    return int(any(outcome.same < outcome.answers for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
