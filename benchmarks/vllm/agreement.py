"""Whether vLLM's greedy answers stay the same where their prefix is restored, beside how far its own agree."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure
from benchmarks.vllm.servers import check_installed, served
from tests.prefix_store.connectors.vllm_server.models import smollm2
from tests.prefix_store.connectors.vllm_server.server import VllmServer

_ROUNDS, _QUICK_ROUNDS = 3, 1
_PROMPTS, _AT_ONCE, _ANSWER = 16, 8, 32
_SHORTEST, _LONGEST = 200, 1_200
_METHOD = f"""\
SmolLM2-135M on vLLM 0.32 for CPUs in bfloat16, greedy: {_PROMPTS} prompts of {_SHORTEST} to {_LONGEST} random tokens in
every round, answers of {_ANSWER} tokens. The reference is what vLLM without a connector answers, one prompt at a time.
The figure is the share of answers that have another token anywhere: of the same vLLM, {_AT_ONCE} prompts at a time; and
of one with the connector, one prompt at a time, whose whole blocks are restored from host memory."""


async def measure(quick: bool) -> Figure:
    check_installed()
    chance = random.Random(13)  # noqa: S311  # of a measurement
    batched: list[float] = []
    restored: list[float] = []
    with served(smollm2(), None) as plain, served(smollm2(), {"memory": "4GiB", "audit": 0}) as kept:
        for _ in range(_QUICK_ROUNDS if quick else _ROUNDS):
            prompts = [_prompt(chance) for _ in range(_PROMPTS)]
            alone = [plain.complete(prompt, _ANSWER) for prompt in prompts]
            batched.append(_differing(alone, _all(plain, prompts)))
            for prompt in prompts:
                kept.complete(prompt, 1)
            kept.settle()
            before = kept.restored()
            restored.append(_differing(alone, [kept.complete(prompt, _ANSWER) for prompt in prompts]))
            if not kept.restored() - before:
                raise CannotMeasure("nothing was restored")
    rows = (
        Row(what="answers that differ, of vLLM's own in a batch", unit="", rounds=tuple(batched), target=None),
        Row(
            what="answers that differ where the prefix was restored",
            unit="",
            rounds=tuple(restored),
            target=Target("most", max(batched)),
        ),
    )
    return Figure(figure="vllm_agreement", title="Answers of vLLM with a restored prefix", method=_METHOD, rows=rows)


def _all(server: VllmServer, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(lambda prompt: server.complete(prompt, _ANSWER), prompts))


def _differing(some: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    return sum(one != other for one, other in zip(some, others, strict=True)) / len(some)


def _prompt(chance: random.Random) -> list[int]:
    return [chance.randrange(1_000, 40_000) for _ in range(chance.randrange(_SHORTEST, _LONGEST))]
