"""How much faster the engine decodes with weights in fewer bits, against the same engine with half floats.

As a program it makes the measurements, in a process of its own: `python -m benchmarks.quantization.decode --rounds 9`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, get_args

import msgspec

from backend.quantized_weights.names import CALIBRATED_QUANTIZATIONS, Quantization
from backend.runners.fused.thread_count import limit_spinning
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import run_on_all_cores

if TYPE_CHECKING:
    from backend.model import ServedModel
    from backend.model_loader.source import ModelSource

_ROUNDS, _QUICK_ROUNDS = 9, 2
_CONTEXT, _STEPS = 112, 16
_MIN = {1: 1.5, 8: 1.1}
_FOR_EITHER = ("int8", "int4")
_KV_MEMORY = 128 * 2**20
_METHOD = """\
Whole steps of the engine (scheduler, model, greedy sampling, detokeniser) at a context of {context} tokens on
{threads} threads; SmolLM2-135M-Instruct under each name of --quantization; runner of the reference: {runner}. A sample
is the median of {steps} steps of a batch whose prompts have been computed; all names take turns in one process, and a
round is a sample against that of the reference in the same round. One of int8 and int4 has to meet the target of each
batch."""


class Measured(msgspec.Struct, kw_only=True):
    """Tokens per second of each round, by batch and name; `none` is the reference."""

    runner: str
    threads: int
    samples: dict[int, list[dict[str, float]]]


async def measure(quick: bool) -> Figure:
    rounds = str(_QUICK_ROUNDS if quick else _ROUNDS)
    said = await run_on_all_cores("benchmarks.quantization.decode", "--rounds", rounds, *(["--quick"] if quick else []))
    found = msgspec.json.decode(said, type=Measured)
    rows = [row for batch, samples in found.samples.items() for row in _rows(batch, samples)]
    method = _METHOD.format(context=_CONTEXT + _STEPS // 2, threads=found.threads, runner=found.runner, steps=_STEPS)
    return Figure(
        figure="quantization_decode", title="Decoding with quantised weights", method=method, rows=tuple(rows)
    )


def _rows(batch: int, samples: list[dict[str, float]]) -> list[Row]:
    return [
        Row(
            what=f"{name}, batch {batch}, against half floats",
            unit=RATIO,
            rounds=tuple(sample[name] / sample["none"] for sample in samples),
            target=Target("least", _MIN[batch]) if name in _FOR_EITHER else None,
            either=f"batch {batch}" if name in _FOR_EITHER else None,
            beside=tuple({"tok/s": sample[name], "half floats, tok/s": sample["none"]} for sample in samples),
        )
        for name in samples[0]
        if name != "none"
    ]


def _measured(rounds: int, quick: bool) -> Measured:
    limit_spinning()
    from backend.model_loader.source import resolve_model

    source = resolve_model("default", lambda _: None)
    names = [
        name for name in get_args(Quantization) if name != "auto" and not (quick and name in CALIBRATED_QUANTIZATIONS)
    ]
    threads = len(os.sched_getaffinity(0))
    served = {name: _served(source, name, threads) for name in names}
    samples = {}
    for batch in _MIN:
        for model in served.values():
            _tokens_per_second(model, batch)  # touches its memory
        samples[batch] = [
            {name: _tokens_per_second(model, batch) for name, model in served.items()} for _ in range(rounds)
        ]
    return Measured(runner=served["none"].runner.name, threads=threads, samples=samples)


def _served(source: ModelSource, name: Quantization, threads: int) -> ServedModel:
    from backend.engine.config import EngineConfig
    from backend.model import load_model

    engine = EngineConfig(
        kv_memory=_KV_MEMORY,
        max_batch=max(_MIN),
        max_context=512,
        threads=threads,
        quantization=name,
        device="cpu",
    )
    return load_model(source, engine, lambda _: None)


def _tokens_per_second(model: ServedModel, batch: int) -> float:
    from backend.engine.engine import Engine
    from backend.engine.sequence import SamplingParams, Sequence
    from backend.text.detokenizer import Detokenizer

    engine = Engine(model.runner, max_batch=batch, step_tokens=512)
    params = SamplingParams(max_tokens=4 * _STEPS * batch, temperature=0.0, ignore_eos=True)
    sequences = [
        Sequence(index, _prompt(index), params, Detokenizer(model.tokenizer.token_bytes), index)
        for index in range(batch)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while not all(sequence.num_generated for sequence in sequences):
        engine.step()
    seconds = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return batch / statistics.median(seconds)


def _prompt(index: int) -> list[int]:
    return [100 + (index * 7919 + position * 104729) % 48000 for position in range(_CONTEXT)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization.decode")
    parser.add_argument("--rounds", type=int, default=_QUICK_ROUNDS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    sys.stdout.buffer.write(msgspec.json.encode(_measured(options.rounds, options.quick)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
