"""Decode throughput of the engine with drafts and without, in turn, on the same answers.

    python -m benchmarks.engine.speculation_program [--rounds 5] [--quantization none] [--medusa DIR]

Each load is a batch of prompts. A round answers them without drafts and with them; the order changes from round to
round. Prefill is not part of a sample: it is the tokens after the first of each answer, by the time they take. The
answers of a round have to be the same, token for token, or there is no report. With Medusa's heads a load is answered a
third time, with what prompt lookup finds alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backend.model import ServedModel
    from backend.speculation.speculator import AdaptiveSpeculator

ROOT = Path(__file__).resolve().parents[2]
ANSWER = 128
"""Tokens of an answer."""
_TEXT = 260
"""Tokens of a document in a prompt."""
_BEGINNING = 64
"""Tokens of a text that is continued."""
_CODE = (
    "gateway/costs/cost.py",
    "gateway/http/hosts.py",
    "cache/entries/outcomes.py",
    "backend/engine/stats.py",
    "backend/text/stop_strings.py",
    "prefix_store/identity/salts.py",
    "gateway/upstreams/breaker.py",
    "telemetry/logs.py",
)
_EVERY = 25
"""Tokens of a prediction of which one is another one than in the answer."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is answered: ``batch`` prompts of a kind."""

    name: str
    kind: str
    batch: int
    temperature: float = 0.0
    predicted: bool = False


LOADS = (
    Load("prompt lookup, code repeated with a change, batch 1", "code", 1),
    Load("prompt lookup, documents summarised, batch 1", "summary", 1),
    Load("prompt lookup, code repeated with a change, batch 8", "code", 8),
    Load("prompt lookup, code repeated with a change, batch 32", "code", 32),
    Load("predicted output, one token of 25 is another, batch 1", "summary", 1, predicted=True),
    Load("predicted output, one token of 25 is another, batch 32", "summary", 32, predicted=True),
    Load("nothing to find, drawn at a temperature of 1, batch 1", "open", 1, temperature=1.0),
    Load("nothing to find, drawn at a temperature of 1, batch 8", "open", 8, temperature=1.0),
    Load("nothing to find, drawn at a temperature of 1, batch 32", "open", 32, temperature=1.0),
)
LOADS_OF_HEADS = (
    Load("texts that were held out, continued, batch 1", "held out", 1),
    Load("texts that were held out, continued, batch 32", "held out", 32),
)
TRAINING_SHARE = 0.9
"""Of the text of benchmarks/data/wikitext-2, its beginning; prompts for heads are from the rest."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of a load."""

    tokens_per_second: float
    steps: int
    tokens: int
    proposed: int
    accepted: int
    accepted_of_heads: int


def main() -> int:
    """Runs the comparison and writes JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--loads", type=int, help="the first so many loads")
    parser.add_argument("--medusa", type=Path, metavar="DIR", help="heads, and the loads for them")
    arguments = parser.parse_args()
    loads = (LOADS_OF_HEADS if arguments.medusa else LOADS)[: arguments.loads]
    print(json.dumps(compare(loads, arguments.rounds, arguments.quantization, arguments.medusa), indent=2))
    return 0


def compare(loads: Sequence[Load], rounds: int, quantization: Any, heads: Path | None) -> dict[str, Any]:
    """Measures each load; the draws of a round are the same with drafts and without."""
    from backend.runners.fused.thread_count import limit_spinning

    limit_spinning()
    import os

    from backend.engine.config import EngineConfig
    from backend.model import load_model
    from backend.model_loader.source import resolve_model
    from backend.runners.warm_up import warm_up
    from backend.speculation.medusa import MedusaHeads, load_medusa
    from backend.speculation.speculator import AdaptiveSpeculator
    from backend.speculation.step_costs import measure

    threads = len(os.sched_getaffinity(0))
    config = EngineConfig(threads=threads, max_context=1024, quantization=quantization)
    model = load_model(resolve_model("default", _quiet), config, _quiet)
    warm_up(model.runner, model.tokenizer.token_bytes, model.max_context)
    costs = measure(model.runner)
    of_heads = None
    if heads is not None:
        shape = model.config.hidden_size, model.config.vocab_size
        of_heads = MedusaHeads(load_medusa(heads, model.directory, *shape))
    ways = ("plain", "drafted") if of_heads is None else ("plain", "drafted", "looked_up")
    report = []
    for load in loads:
        prompts = _PROMPTS[load.kind](model)[: load.batch]
        predictions = _edited(answer(model, prompts, load)[1]) if load.predicted else None
        samples: dict[str, list[Sample]] = {way: [] for way in ways}
        for number in range(rounds):
            results = []
            for way in ways if number % 2 == 0 else reversed(ways):
                speculator = None
                if way != "plain":
                    speculator = AdaptiveSpeculator(costs, medusa=of_heads if way == "drafted" else None)
                sample, answers = answer(model, prompts, load, speculator, predictions, seed=number)
                samples[way].append(sample)
                results.append(answers)
            if any(answers != results[0] for answers in results):
                raise AssertionError(f"{load.name}: drafts changed an answer")
            speeds = ", ".join(f"{way} {taken[-1].tokens_per_second:.0f}" for way, taken in samples.items())
            print(f"{load.name}: {speeds}", file=sys.stderr)
        report.append({"load": asdict(load)} | {way: list(map(asdict, taken)) for way, taken in samples.items()})
    return {
        "model": model.name,
        "threads": threads,
        "runner": model.runner.name,
        "step_ms": {
            rows: round((costs.drafted(rows) if rows > 1 else costs.plain(rows)) * 1e3, 3)
            for rows in (1, 2, 4, 8, 16, 32)
        },
        "loads": report,
    }


def answer(
    model: ServedModel,
    prompts: list[list[int]],
    load: Load,
    speculator: AdaptiveSpeculator | None = None,
    predictions: list[list[int]] | None = None,
    seed: int = 0,
) -> tuple[Sample, list[list[int]]]:
    """Answers all prompts at the same time; returns the sample, and the tokens of the answers."""
    from backend.engine.engine import Engine
    from backend.engine.sequence import SamplingParams, Sequence
    from backend.speculation.medusa import MEDUSA
    from backend.text.detokenizer import Detokenizer

    engine = Engine(model.runner, max_batch=len(prompts), step_tokens=None, speculator=speculator)
    params = SamplingParams(max_tokens=ANSWER, temperature=load.temperature, ignore_eos=True, seed=seed)
    sequences = [
        Sequence(
            number,
            prompt,
            params,
            Detokenizer(model.tokenizer.token_bytes),
            1000 * seed + number,
            prediction=predictions[number] if predictions and speculator is not None else (),
        )
        for number, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while not all(sequence.num_generated for sequence in sequences):
        engine.step()
    before, steps = sum(sequence.num_generated for sequence in sequences), engine.stats().steps
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - started
    tokens = sum(sequence.num_generated for sequence in sequences) - before
    stats = engine.stats()
    return (
        Sample(
            tokens_per_second=tokens / seconds,
            steps=stats.steps - steps,
            tokens=tokens,
            proposed=sum(counts.proposed_tokens for counts in stats.drafts.values()),
            accepted=sum(counts.accepted_tokens for counts in stats.drafts.values()),
            accepted_of_heads=sum(
                counts.accepted_tokens for method, counts in stats.drafts.items() if method == MEDUSA
            ),
        ),
        [sequence.tokens[sequence.num_prompt :] for sequence in sequences],
    )


def _code(model: ServedModel) -> list[list[int]]:
    """A program, and its beginning with a first line that is new; the rest is likely to follow."""
    prompts = []
    for number in range(32):
        text = (ROOT / _CODE[number % len(_CODE)]).read_text(encoding="utf-8")
        ids = _ids(model, text)[number : number + _TEXT]
        program = model.tokenizer.fast.decode(ids)
        begun = "\n".join(program.splitlines()[:4])
        prompts.append(
            _chat(
                model,
                f"Repeat this program with a comment before it:\n\n```python\n{program}\n```",
                f"```python\n# Checked {number}\n{begun}\n",
            )
        )
    return prompts


def _summary(model: ServedModel) -> list[list[int]]:
    return [
        _chat(model, f"Summarise this text in its own words:\n\n{paragraph}", "The text says the following.")
        for paragraph in _paragraphs(model)
    ]


def _open(model: ServedModel) -> list[list[int]]:
    return [_chat(model, f"Write a story about the number {number} and the sea.", "") for number in range(32)]


def _held_out(model: ServedModel) -> list[list[int]]:
    text = wikitext()
    ids = _ids(model, text[int(TRAINING_SHARE * len(text)) :])
    distance = len(ids) // 32
    return [ids[start : start + _BEGINNING] for start in range(0, 32 * distance, distance)]


_PROMPTS: dict[str, Callable[[ServedModel], list[list[int]]]] = {
    "code": _code,
    "summary": _summary,
    "open": _open,
    "held out": _held_out,
}


def wikitext() -> str:
    """The text of benchmarks/data/wikitext-2."""
    file = ROOT / "benchmarks" / "data" / "wikitext-2" / "test.txt.gz"
    return gzip.decompress(file.read_bytes()).decode()


def _paragraphs(model: ServedModel) -> list[str]:
    ids = _ids(model, wikitext()[:300_000])
    return [model.tokenizer.fast.decode(ids[start : start + _TEXT]) for start in range(500, 500 + 32 * 700, 700)]


def _chat(model: ServedModel, question: str, begun: str) -> list[int]:
    return _ids(model, f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{begun}")


def _ids(model: ServedModel, text: str) -> list[int]:
    ids: list[int] = model.tokenizer.fast.encode(text, add_special_tokens=False).ids
    return ids


def _edited(answers: list[list[int]]) -> list[list[int]]:
    """What a client may predict: the answer before it was edited."""
    return [
        [token ^ 1 if place % _EVERY == _EVERY - 1 else token for place, token in enumerate(tokens)]
        for tokens in answers
    ]


def _quiet(sentence: str) -> None:
    """Progress that nobody reads."""


if __name__ == "__main__":
    sys.exit(main())
