"""How long answers take with the gateway's own predictions, against without: gateway and engine as processes."""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, cores, free_port, server
from benchmarks.semantic.intent_data import banking77, clinc150, embedded
from cache.semantic.embedding.model_files import models_folder
from gateway.proxy.predictions.drafts import MIN_SIMILARITY

_MODEL = "SmolLM2-135M-Instruct"
_TOKENS = 200
_SYSTEM = "Answer in one short sentence."
_SAMPLE = 1_200
_READY_DEADLINE = 120.0
_KNOWN_DEADLINE = 30.0
_NEVER_SLOWER = 0.98
_SEED = 37
# The similar question was asked before, and its answer may not be served: it is at most a draft.
_REFUSING = {"x-keepgate-max-risk": "0"}
_ANEW = {**_REFUSING, "Cache-Control": "no-cache"}
_METHOD = f"""\
Two gateways in front of one engine with {_MODEL}, one that sends predictions and one that does not, all on the same two
cores and without Redis; the engine shares no prompts, so that none gains by coming second. Each gateway is asked a
question, and when the semantic cache knows it, a similar one whose client takes no answer of another question
(`x-keepgate-max-risk: 0`), one after the other and which gateway first by turns; then the similar one once more with
`Cache-Control: no-cache`. Pairs are questions of the test splits of Banking77 and CLINC150 and those nearest to them,
with a cosine of at least {MIN_SIMILARITY:g}. The system prompt is "{_SYSTEM}". Answers have {_TOKENS} tokens at most,
are greedy, and have to be the same from both, or there is no figure; pairs whose first answer was cut are left out, for
the semantic cache does not keep it. A figure is the time to the end of all answers of a round without predictions,
divided by the time with them."""


@dataclass(slots=True)
class _Side:
    """A gateway that is measured."""

    session: aiohttp.ClientSession

    async def ask(self, text: str, headers: dict[str, str]) -> "_Answer":
        """Raises CannotMeasure."""
        body = {
            "model": _MODEL,
            "messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": _TOKENS,
        }
        began = time.monotonic()
        async with self.session.post("/v1/chat/completions", json=body, headers=headers) as response:
            data = await response.read()
        seconds = time.monotonic() - began
        if response.status != 200 or response.headers["x-keepgate-cache"] == "hit":
            raise CannotMeasure(f"The gateway answers with status {response.status}: {data[:300]!r}")
        answer = msgspec.json.decode(data)
        (choice,) = answer["choices"]
        is_whole = choice["finish_reason"] == "stop"
        return _Answer(choice["message"]["content"], answer["usage"]["completion_tokens"], seconds, is_whole)

    async def stats(self) -> dict[str, Any]:
        async with self.session.get("/v1/cache/stats") as response:
            stats: dict[str, Any] = await response.json()
            return stats

    async def learn(self, text: str) -> bool:
        """Ask a question; return when similar ones find its answer, False if they will not. Raises CannotMeasure."""
        known = await self._known()
        if not (await self.ask(text, _REFUSING)).is_whole:
            return False
        try:
            async with asyncio.timeout(_KNOWN_DEADLINE):
                while await self._known() == known:  # noqa: ASYNC110  # another process
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise CannotMeasure(f"The semantic cache did not learn a question in {_KNOWN_DEADLINE:g} s.") from error
        return True

    async def _known(self) -> int:
        known: int = (await self.stats())["layers"]["semantic"]["entries"]
        return known

    async def predictions(self, source: str) -> dict[str, int]:
        counts: dict[str, int] = (await self.stats())["predictions"]["sources"].get(source, {})
        return counts


class _Answer(NamedTuple):
    text: str
    tokens: int
    seconds: float
    is_whole: bool


async def measure(quick: bool) -> Figure:
    rounds, each = (1, 3) if quick else (5, 12)
    pairs = iter(await asyncio.to_thread(_pairs))
    similar: list[tuple[float, dict[str, float | str]]] = []
    same: list[tuple[float, dict[str, float | str]]] = []
    async with _sides() as (plain, predicting):
        for _ in range(rounds):
            questions = await _prepared(pairs, (plain, predicting), each)
            similar.append(await _compared(plain, predicting, questions, _REFUSING, "neighbour"))
            same.append(await _compared(plain, predicting, questions, _ANEW, "stale"))
    return Figure(
        figure="predictions",
        title="Predictions of the gateway's own",
        method=_METHOD,
        rows=(
            _row("similar questions", similar, Target("least", _NEVER_SLOWER)),
            _row("the same questions, answered anew", same, None),
        ),
    )


def _row(what: str, rounds: Sequence[tuple[float, dict[str, float | str]]], target: Target | None) -> Row:
    ratios, beside = zip(*rounds, strict=True)
    return Row(what=f"{what}, batch 1", unit=RATIO, rounds=ratios, target=target, beside=beside)


async def _compared(
    plain: _Side, predicting: _Side, questions: Sequence[str], headers: dict[str, str], source: str
) -> tuple[float, dict[str, float | str]]:
    """How many times as long the plain side takes, and what stands behind it. Raises CannotMeasure."""
    before = await predicting.predictions(source)
    answers: dict[int, list[_Answer]] = {id(plain): [], id(predicting): []}
    for place, question in enumerate(questions):
        sides = (plain, predicting) if place % 2 else (predicting, plain)
        for side in sides:
            answers[id(side)].append(await side.ask(question, headers))
        if answers[id(plain)][-1].text != answers[id(predicting)][-1].text:
            raise CannotMeasure(f"A prediction has changed the answer to {question!r}.")
    after = await predicting.predictions(source)
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in after}
    tokens = sum(answer.tokens for answer in answers[id(plain)])
    took = [sum(answer.seconds for answer in answers[id(side)]) for side in (plain, predicting)]
    accepted, rejected = counts.get("accepted_tokens", 0), counts.get("rejected_tokens", 0)
    return took[0] / took[1], {
        "seconds an answer, without": took[0] / len(questions),
        "seconds an answer": took[1] / len(questions),
        "answers with a prediction": counts.get("answers", 0) / len(questions),
        "accepted of all tokens": accepted / tokens,
        "accepted of verified": accepted / (accepted + rejected) if accepted + rejected else 0.0,
    }


async def _prepared(pairs: Iterator[tuple[str, str]], sides: Sequence[_Side], count: int) -> list[str]:
    """So many questions to which the sides know similar ones. Raises CannotMeasure."""
    questions: list[str] = []
    for known, question in pairs:
        # The answers of both sides are the same, and so is whether they are kept.
        if all([await side.learn(known) for side in sides]):
            questions.append(question)
        if len(questions) == count:
            return questions
    raise CannotMeasure(f"There are only {len(questions)} pairs of similar questions for a round of {count}.")


def _pairs() -> list[tuple[str, str]]:
    """Questions and the ones nearest to them, no text twice."""
    chosen = random.Random(_SEED)  # noqa: S311  # the same pairs every time
    found: list[tuple[str, str]] = []
    for questions in (banking77("test"), clinc150("test")):
        texts = chosen.sample(list(dict.fromkeys(questions.texts)), _SAMPLE)
        vectors = embedded(texts, models_folder())
        cosines = vectors @ vectors.T
        np.fill_diagonal(cosines, 0.0)
        for place, other in enumerate(cosines.argmax(axis=1).tolist()):
            if cosines[place, other] >= MIN_SIMILARITY:
                found.append((texts[other], texts[place]))
    chosen.shuffle(found)
    used: set[str] = set()
    pairs: list[tuple[str, str]] = []
    for pair in found:
        if used.isdisjoint(pair):
            used.update(pair)
            pairs.append(pair)
    return pairs


@asynccontextmanager
async def _sides() -> AsyncIterator[tuple[_Side, _Side]]:
    """The gateway without predictions and the one with, both ready. Raises CannotMeasure."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepgate-bench-")))
        port = free_port()
        command = [sys.executable, "-m", "backend", "--port", str(port), "--no-prefix-sharing"]
        await stack.enter_async_context(server(command, port, cores().all, patience=_READY_DEADLINE))
        engine = f"http://127.0.0.1:{port}/v1"
        yield (
            await _gateway(stack, folder / "plain", engine, predicts=False),
            await _gateway(stack, folder / "predicting", engine, predicts=True),
        )


async def _gateway(stack: contextlib.AsyncExitStack, folder: Path, engine: str, *, predicts: bool) -> _Side:
    await asyncio.to_thread(folder.mkdir)
    settings = {
        "upstreams": [{"url": engine, "predictions": True}],
        "cache": {"predictions": predicts},
        "semantic": {"mode": "on", "deadline": 5.0},
        "redis": "none",
        "state_dir": str(folder),
        "log_level": "error",
    }
    file = folder / "keepgate.yaml"
    await asyncio.to_thread(file.write_bytes, msgspec.json.encode(settings))  # JSON is YAML
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", "--port", str(port), "--config", str(file)]
    await stack.enter_async_context(server(command, port, cores().all))
    session = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
    side = _Side(session)
    try:
        async with asyncio.timeout(_READY_DEADLINE):
            while not await _is_ready(side):  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise CannotMeasure(f"A gateway was not ready within {_READY_DEADLINE:g} s.") from error
    return side


async def _is_ready(side: _Side) -> bool:
    """Whether the engine and the semantic cache answer."""
    async with side.session.get("/ready") as response:
        if response.status != 200:
            return False
    return bool((await side.stats())["layers"]["semantic"].get("available"))
