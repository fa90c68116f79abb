"""Decode throughput of the engine beside transformers' generate, on the same weights, in one run.

Two worker processes load the bundled model: one steps the whole engine (scheduler, runner, sampling, detokenizer), the
other runs `generate`. They are asked in turn, so that both see the same machine; while one computes the other sleeps.
A sample is the median time of decode steps of a batch whose prompts have been computed, so prefill is not part of it; a
row has the median over the rounds. `generate` is measured in float32 and bfloat16 and the better one is compared. All
workers have the same setting of OpenMP's spinning (runners/fused/thread_count.py), which on busy machines helps both.

    python -m benchmarks.engine.decode_program [--batches 1 8 32] [--sampled 8 32] [--rounds 5]

Greedy, and at `--sampled` batches drawn at the temperature and top-p that chat applications send.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

CONTEXT = 112
"""Tokens of each prompt; with the tokens generated the context is about 128."""
STEPS = 16
TEMPERATURE, TOP_P = 0.7, 0.9
WORKERS = ("keepgate", "transformers-float32", "transformers-bfloat16")


def main() -> int:
    """Runs the comparison and writes JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--sampled", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.threads)
    loads = [(batch, False) for batch in arguments.batches] + [(batch, True) for batch in arguments.sampled]
    report = compare(loads, arguments.rounds, arguments.threads)
    print(json.dumps(report, indent=2))
    return 0


def compare(loads: list[tuple[int, bool]], rounds: int, threads: int) -> dict[str, Any]:
    """Asks the workers in turn and sums up. A load is a batch, and whether its tokens are drawn."""
    workers = {name: Worker(name, threads) for name in WORKERS}
    rows = []
    given_up: set[str] = set()
    try:
        for batch, sampled in loads:
            samples: dict[str, list[float]] = {name: [] for name in WORKERS}
            for round_number in range(rounds):
                for name, worker in workers.items():
                    if round_number and name in given_up:
                        continue
                    samples[name].append(worker.measure(batch, sampled))
                    load = f"batch {batch}, sampled" if sampled else f"batch {batch}"
                    print(f"{load}, round {round_number + 1}: {name} {samples[name][-1]:.1f}", file=sys.stderr)
                # Without hardware for it bfloat16 is many times slower: one round is enough to see that.
                if samples["transformers-bfloat16"][0] < 0.7 * samples["transformers-float32"][0]:
                    given_up.add("transformers-bfloat16")
            rows.append(_row(batch, sampled, samples))
    finally:
        for worker in workers.values():
            worker.close()
    return {
        "figure": "engine decode",
        "hardware": _hardware(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": "SmolLM2-135M-Instruct",
        "context": CONTEXT + STEPS // 2,
        "threads": threads,
        "runner": workers["keepgate"].description,
        "rows": rows,
    }


def _row(batch: int, sampled: bool, samples: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in samples.items()}
    best = max(value for name, value in medians.items() if name != "keepgate")
    return {
        "batch": batch,
        "sampled": sampled,
        "keepgate_tokens_per_second": round(medians["keepgate"], 1),
        "transformers_float32_tokens_per_second": round(medians["transformers-float32"], 1),
        "transformers_bfloat16_tokens_per_second": round(medians["transformers-bfloat16"], 1),
        "ratio": round(medians["keepgate"] / best, 2),
        "must_reach": 2.0,
        "keepgate_samples": [round(value, 1) for value in samples["keepgate"]],
        "transformers_samples": [round(value, 1) for value in samples["transformers-float32"]],
    }


class Worker:
    """A process that measures when it is asked to."""

    def __init__(self, name: str, threads: int) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.engine.decode_program",
            "--worker",
            name,
            "--threads",
            str(threads),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.description = self._answer()

    def measure(self, batch: int, sampled: bool) -> float:
        """Decode tokens per second at a batch size."""
        assert self._process.stdin is not None  # noqa: S101 - it was opened above
        self._process.stdin.write(f"{batch} {int(sampled)}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 - it was opened above
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended early, status {self._process.wait()}")
        return line.strip()


def work(name: str, threads: int) -> int:
    """Body of a worker process: loads, says what it is, then answers a load with tokens per second."""
    measure, description = _engine(threads) if name == "keepgate" else _transformers(name.split("-")[1], threads)
    measure(1, False)
    print(description, flush=True)
    for line in sys.stdin:
        batch, sampled = line.split()
        print(measure(int(batch), sampled == "1"), flush=True)
    return 0


def _engine(threads: int) -> tuple[Callable[[int, bool], float], str]:
    from backend.runners.fused.thread_count import limit_spinning

    limit_spinning()
    from backend.engine.config import EngineConfig
    from backend.engine.engine import Engine
    from backend.engine.sequence import SamplingParams, Sequence
    from backend.model import load_model
    from backend.model_loader.source import resolve_model
    from backend.text.detokenizer import Detokenizer

    config = EngineConfig(threads=threads, max_context=1024)
    model = load_model(resolve_model("default", _quiet), config, _quiet)

    def measure(batch: int, sampled: bool) -> float:
        engine = Engine(model.runner, max_batch=batch, step_tokens=config.step_tokens)
        temperature, top_p = (TEMPERATURE, TOP_P) if sampled else (0.0, 1.0)
        length = 4 * STEPS * batch
        params = SamplingParams(max_tokens=length, temperature=temperature, top_p=top_p, ignore_eos=True)
        sequences = [
            Sequence(index, _prompt(index), params, Detokenizer(model.tokenizer.token_bytes), index)
            for index in range(batch)
        ]
        for sequence in sequences:
            engine.add(sequence)
        while not all(sequence.num_generated for sequence in sequences):
            engine.step()
        seconds = []
        for _ in range(STEPS):
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
        return batch / statistics.median(seconds)

    return measure, model.runner.name


def _transformers(dtype: str, threads: int) -> tuple[Callable[[int, bool], float], str]:
    from backend.runners.fused.thread_count import limit_spinning

    limit_spinning()
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    from backend.model_loader.source import resolve_model

    torch.set_num_threads(threads)
    directory = resolve_model("default", _quiet).directory
    # In evaluation mode as it comes. Any: the library's own types refuse the call of generate that it documents.
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))

    def measure(batch: int, sampled: bool) -> float:
        # Emulated, bfloat16 takes minutes for a long prefill: it gets short prompts, which can only help it.
        length, steps = (CONTEXT, STEPS) if dtype == "float32" else (CONTEXT // 7, STEPS // 4)
        ids = torch.tensor([_prompt(index)[:length] for index in range(batch)])
        drawn = {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0}
        ends: list[float] = []

        def note(*_: Any, **__: Any) -> torch.Tensor:
            """A stopping criterion is asked after each token; this one never stops."""
            ends.append(time.perf_counter())
            return torch.zeros(batch, dtype=torch.bool)

        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=steps + 1,
                min_new_tokens=steps + 1,
                **(drawn if sampled else {"do_sample": False}),
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([note]),
            )
        return batch / statistics.median(later - earlier for earlier, later in pairwise(ends))

    return measure, dtype


def _prompt(index: int) -> list[int]:
    return [100 + (index * 7919 + position * 104729) % 48000 for position in range(CONTEXT)]


def _quiet(sentence: str) -> None:
    """Progress that nobody reads."""


def _hardware() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = f"{names[0]}, {len(names)} cores" if names else cpu
    return cpu


if __name__ == "__main__":
    sys.exit(main())
