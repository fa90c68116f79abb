"""``python -m cache.semantic.evaluation.check SETTINGS``: whether an embedding model could be served, and by what.

``keepgate doctor`` runs it; settings are JSON, without the key, which is in the environment. It prints a JSON object
for each finding, with ``check``, ``status`` (ok, warning or problem), ``summary`` and ``advice``. A model that
has not been compared with its reference yet is only looked for.
"""

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path

import aiohttp
import msgspec

from cache.semantic.embedding.errors import ModelUnusable, NativeUnavailable
from cache.semantic.embedding.load import load_encoder
from cache.semantic.embedding.model_files import find_model
from cache.semantic.embedding.native.build import native_library
from cache.semantic.embedding.reference import reference_file
from cache.semantic.embedding.server import EmbeddingServer, first_vector

_CHECK = "semantic cache"
_TEXT = "What is the capital of France?"
_KEY = "KEEPGATE_SEMANTIC_MODEL_KEY"
_TIMES = 5
_SERVER_SECONDS = 10.0
_WIDE_LANES = 16
_COMPILER = "install g++ (Debian: apt-get install g++), or name a compiler with CXX"


class Asked(msgspec.Struct):
    """The settings, by the names that they have in the service's config."""

    model: str
    models: str
    model_url: str = ""
    model_prompt: str | None = None
    deadline: float = 0.05


class _Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main(asked: Asked) -> int:
    """Print the findings; returns the exit status."""
    if asked.model_url:
        asyncio.run(_check_server(asked))
        return 0
    cache = Path(asked.models)
    try:
        files = find_model(asked.model, asked.model_prompt)
        fingerprint = files.fingerprint()
        if reference_file(fingerprint, cache).exists():
            _check_encoder(asked, cache)
        else:
            _say("ok", f"{files.name} is there; it is compared with torch at the first start, which takes some seconds")
            _check_native(cache)
    except ModelUnusable as error:
        _say("problem", str(error), "do what the message says, or set semantic.mode to off")
    return 0


async def _check_server(asked: Asked) -> None:
    """Ask the server as the service does; it has the time of a background call."""
    server = EmbeddingServer(asked.model_url, asked.model, os.environ.get(_KEY, ""), asked.model_prompt or "")
    messages = _listening("cache.stores.breaker")
    taken = []
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(_SERVER_SECONDS):
            vector = await first_vector(session, server, _SERVER_SECONDS / 2)
            for _ in range(_TIMES):
                began = time.perf_counter()
                await first_vector(session, server, _SERVER_SECONDS / 2)
                taken.append(time.perf_counter() - began)
    except TimeoutError:
        reason = next(iter(messages), f"{server.name} does not answer in time")
        _say("problem", reason, "start that server, or correct semantic.model_url, model or model_key")
        return
    said = f"{server.name}, {len(vector)} dimensions: {min(taken) * 1000:.1f} ms for a short question"
    if min(taken) > asked.deadline / 2:
        _say(
            "warning", f"{said}, of {asked.deadline * 1000:g} ms in all", "set semantic.deadline to twice that or more"
        )
    else:
        _say("ok", said)


def _listening(name: str) -> list[str]:
    """What a logger of this process says from now on, in place of printing it."""
    messages, log = _Messages(), logging.getLogger(name)
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    log.propagate = False
    return messages.said


def _check_encoder(asked: Asked, cache: Path) -> None:
    """Load the model as the service does, which compares its vectors with those of the reference."""
    messages = _listening("cache.semantic.embedding")
    encoder = load_encoder(asked.model, cache, prompt=asked.model_prompt)
    taken = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        encoder.encode([_TEXT])
        taken.append(time.perf_counter() - began)
    said = f"{encoder.name}, {encoder.dimensions} dimensions: {min(taken) * 1000:.1f} ms for a short question"
    if messages:  # a faster runtime was passed over
        reason = messages[-1]
        _say("warning", f"{said}; {reason}", _COMPILER if "compiler" in reason else "it is right, and slower")
    else:
        _say("ok", f"{said}; {_instructions(cache)} kernels, whose vectors are those of the reference")


def _check_native(cache: Path) -> None:
    try:
        _say("ok", f"{_instructions(cache)} kernels are built")
    except NativeUnavailable as reason:
        _say("warning", f"the compiled encoder cannot be built, torch will serve: {reason}", _COMPILER)


def _instructions(cache: Path) -> str:
    """What the compiled encoder was built for. Raises NativeUnavailable."""
    lanes = native_library(cache).bert_lanes()
    return "AVX-512" if lanes == _WIDE_LANES else "AVX2"


def _say(status: str, summary: str, advice: str = "") -> None:
    print(json.dumps({"check": _CHECK, "status": status, "summary": summary, "advice": advice}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Asked)))
