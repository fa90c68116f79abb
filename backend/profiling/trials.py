"""What other settings would change, found out by running them: in turn with the settings as they are, several times.

Each round runs every variant once, in an order that moves on from round to round, so that other load on the machine
affects all of them alike. A variant is compared within each round, and the median of these comparisons counts. Before
each run the engine's own KV blocks are forgotten. All variants generate as many tokens for each request as the first
run did, so that they do equal work.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import torch

from backend.api.prefix_store import unsupported_reason
from backend.api.server_state import ServerState
from backend.checkpoints.gguf.convert import Progress
from backend.engine.config import EngineConfig
from backend.engine.model_runner import BLOCK_SIZE
from backend.errors import ModelError
from backend.model import ServedModel, load_model
from backend.model_loader.source import ModelSource
from backend.profiling.changes import ABOUT, Change
from backend.profiling.machine import ProcessorUse
from backend.profiling.memory import is_on_cuda, read_bytes
from backend.profiling.replay import RequestRecord, forget, opened, replay
from backend.profiling.workload import WorkItem
from backend.quantized_weights.names import Quantization
from backend.runners.warm_up import warm_up
from prefix_store.store.config import StoreConfig

Verdict = Literal["recommended", "a trade-off", "no gain", "worse", "not tried"]
AS_IT_IS = "as it is"
_GAIN = 0.05
"""A smaller difference is taken for noise; and each round must agree about the direction."""
_LEAST_STORE = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run, or the medians of several. Times in seconds."""

    generated_per_second: float
    ttft: float
    """Median of the requests."""
    itl: float
    """Median of all gaps between tokens; 0: there are none."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a change does, measured."""

    name: str
    about: str
    verdict: Verdict
    reason: str
    """Of the verdict, in a sentence."""
    before: Measurement | None
    """Medians as it is; None: the change was not tried."""
    after: Measurement | None
    ratios: list[Measurement]
    """After to before, in each round."""

    @property
    def ratio(self) -> Measurement:
        """The medians of the rounds."""
        return medians(self.ratios)


@dataclass(frozen=True, slots=True)
class Trials:
    """All changes that were to be tried."""

    changes: list[Trial]
    rounds: int
    others: float
    """Processors that other programs used meanwhile: where it is much, differences drown in it."""


@dataclass(slots=True)
class _Variant:
    name: str
    about: str
    model: ServedModel
    engine: EngineConfig
    concurrency: int
    runs: list[Measurement] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all trials share."""

    source: ModelSource
    model: ServedModel
    engine: EngineConfig
    items: Sequence[WorkItem]
    concurrency: int
    lengths: Mapping[str, list[int]]
    """Tokens to generate for each choice, by the request's name."""
    tokens: int
    """Of all prompts and answers."""


async def run_trials(bench: Bench, changes: Sequence[Change], rounds: int, progress: Progress) -> Trials:
    """Tries the changes, in their order.

    Raises:
        ModelError: a run failed.
    """
    variants, trials = [_Variant(AS_IT_IS, "", bench.model, bench.engine, bench.concurrency)], []
    for change in changes:
        try:
            variants.append(_variant(change, bench, progress))
        except ModelError as reason:
            trials.append(Trial(change, ABOUT[change], "not tried", str(reason), None, None, []))
    use = ProcessorUse()
    if len(variants) > 1:
        await _run(variants, bench, rounds, progress)
    first, *others = variants
    found = {trial.name: trial for trial in [*trials, *(_compared(first, other) for other in others)]}
    return Trials([found[change] for change in changes], rounds, use.until_now()[1])


def _variant(change: Change, bench: Bench, progress: Progress) -> _Variant:
    """Prepares a change. Raises ModelError with the reason why it cannot be tried."""
    about, model, engine = ABOUT[change], bench.model, bench.engine
    if change == "batch":
        concurrency = 2 * bench.concurrency
        if len(bench.items) < concurrency:
            raise ModelError(
                f"{len(bench.items)} requests are too few for {concurrency} at a time; expected more in --requests, "
                "or a smaller --concurrency"
            )
        answers = concurrency * max(map(len, bench.lengths.values()))
        batch = max(answers, engine.max_batch or model.runner.max_batch)
        return _Variant(
            change, f"{about}: {concurrency}", model, dataclasses.replace(engine, max_batch=batch), concurrency
        )
    if change == "prefix-store":
        return _Variant(change, about, model, _with_store(bench), bench.concurrency)
    if model.quantization is not None and engine.quantization in ("none", change):
        raise ModelError(f"the weights are quantised already: {model.runner.weights_precision}")
    room, needed = _free_memory(model), read_bytes(model) + model.runner.num_blocks * _block_bytes(model)
    if needed > room:
        raise ModelError(
            f"a second model needs up to {needed / 2**30:.1f} GiB beside the first, and {room / 2**30:.1f} GiB are "
            "free; a smaller --kv-memory leaves room"
        )
    quantised = dataclasses.replace(engine, quantization=cast(Quantization, change))
    other = load_model(bench.source, quantised, progress)
    warm_up(other.runner, other.tokenizer.token_bytes, other.max_context)
    return _Variant(change, about, other, quantised, bench.concurrency)


def _with_store(bench: Bench) -> EngineConfig:
    if bench.engine.prefix_store is not None:
        raise ModelError("there is a prefix store already")
    if not bench.engine.shares_prefixes:
        raise ModelError("--no-prefix-sharing computes every prompt in full")
    if reason := unsupported_reason(bench.model):
        raise ModelError(reason)
    # The blocks of all requests, and half as much again for what is stored with them.
    needed = max(_LEAST_STORE, 3 * bench.tokens * bench.model.runner.kv_bytes_per_token // 2)
    if needed > (room := _free_host_memory()):
        raise ModelError(
            f"the workload's keys and values take {needed / 2**30:.1f} GiB of host memory, and {room / 2**30:.1f} GiB "
            "are free"
        )
    return dataclasses.replace(bench.engine, prefix_store=StoreConfig(memory_bytes=needed, audit_every=0))


def _block_bytes(model: ServedModel) -> int:
    return BLOCK_SIZE * model.runner.kv_bytes_per_token


def _free_memory(model: ServedModel) -> int:
    """Bytes that a second model could take where this one is."""
    if is_on_cuda(model.runner):
        gc.collect()
        return int(torch.cuda.mem_get_info()[0])
    return _free_host_memory()


def _free_host_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


async def _run(variants: Sequence[_Variant], bench: Bench, rounds: int, progress: Progress) -> None:
    """Runs all variants ``rounds`` times, after a round that does not count."""
    async with AsyncExitStack() as stack:
        states = [await stack.enter_async_context(opened(each.model, each.engine)) for each in variants]
        for turn in range(rounds + 1):
            progress(f"round {turn} of {rounds}" if turn else "a round that does not count")
            for place in range(len(variants)):
                index = (place + turn) % len(variants)
                measured = await _measured(states[index], bench, variants[index].concurrency)
                if turn:
                    variants[index].runs.append(measured)


async def _measured(state: ServerState, bench: Bench, concurrency: int) -> Measurement:
    await forget(state)
    records = await replay(state, bench.items, concurrency, lengths=bench.lengths)
    return measurement(records)


def measurement(records: Sequence[RequestRecord]) -> Measurement:
    """The figures of a run."""
    seconds = max(record.ended for record in records) - min(record.arrived for record in records)
    gaps = [gap for record in records for gap in record.gaps]
    return Measurement(
        sum(sum(record.generated) for record in records) / seconds,
        statistics.median(record.ttft for record in records),
        statistics.median(gaps) if gaps else 0.0,
    )


def _compared(first: _Variant, other: _Variant) -> Trial:
    ratios = [
        Measurement(
            after.generated_per_second / before.generated_per_second,
            after.ttft / before.ttft,
            after.itl / before.itl if before.itl else 1.0,
        )
        for before, after in zip(first.runs, other.runs, strict=True)
    ]
    verdict, reason = judged([each.generated_per_second for each in ratios], [each.ttft for each in ratios])
    return Trial(other.name, other.about, verdict, reason, medians(first.runs), medians(other.runs), ratios)


def judged(speeds: Sequence[float], ttfts: Sequence[float]) -> tuple[Verdict, str]:
    """The verdict on a change, and why.

    Args:
        speeds: tokens a second, after to before, in each round.
        ttfts: time to first token likewise.
    """
    faster, slower = _direction(speeds)
    later, sooner = _direction(ttfts)
    said = f"tokens/s {_ratio(speeds)}, TTFT {_ratio(ttfts)}"
    if faster and later:
        return "a trade-off", f"{said}: for throughput, at the cost of the first token"
    if sooner and slower:
        return "a trade-off", f"{said}: for the first token, at the cost of throughput"
    if faster or sooner:
        return "recommended", said
    if slower or later:
        return "worse", f"{said}: not recommended"
    return "no gain", f"{said}: not recommended, for that is within the noise"


def _direction(ratios: Sequence[float]) -> tuple[bool, bool]:
    """Whether these are more than 1, and whether they are less: by enough, and in each round."""
    median = statistics.median(ratios)
    return median >= 1 + _GAIN and min(ratios) > 1, median <= 1 - _GAIN and max(ratios) < 1


def _ratio(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"


def medians(runs: Sequence[Measurement]) -> Measurement:
    """The median of each figure."""
    return Measurement(
        statistics.median(run.generated_per_second for run in runs),
        statistics.median(run.ttft for run in runs),
        statistics.median(run.itl for run in runs),
    )
