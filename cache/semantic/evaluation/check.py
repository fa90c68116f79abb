"""``python -m cache.semantic.evaluation.check SETTINGS``: whether an embedding model could be served, and by what.

``keepgate doctor`` runs it; settings are JSON, without the key, which is in the environment. It prints a JSON object
for each finding, with ``check``, ``status`` (ok, warning or problem), ``summary`` and ``advice``. A model that
has not been compared with its reference yet is only looked for.
"""

import asyncio
import json
import os
import sys
import time
import timeit
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec

from cache.semantic.embedding.errors import EmbeddingFailed, ModelUnusable, NativeUnavailable
from cache.semantic.embedding.load import load_encoder, reference_file
from cache.semantic.embedding.model_files import find_model
from cache.semantic.embedding.native.encoder import native_library
from cache.semantic.embedding.server import EmbeddingServer
from cache.semantic.model_server import BadReply

_TEXT = "What is the capital of France?"
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


def main(asked: Asked) -> None:
    """Print the findings."""
    if asked.model_url:
        asyncio.run(_check_server(asked))
        return
    cache = Path(asked.models)
    try:
        files = find_model(asked.model, asked.model_prompt)
        if reference_file(files.fingerprint(), cache).exists():
            _check_encoder(asked, cache)
        else:
            _say("ok", f"{files.name} is there; it is compared with torch at the first start, which takes some seconds")
            _say("ok", f"{_instructions(cache)} kernels are built")
    except ModelUnusable as error:
        _say("problem", str(error), "do what the message says, or set semantic.mode to off")
    except NativeUnavailable as reason:
        _say("warning", f"the compiled encoder cannot be built, torch will serve: {reason}", _COMPILER)


async def _check_server(asked: Asked) -> None:
    """Ask the server as the service does; it has the time of a background call."""
    key = os.environ.get("KEEPGATE_SEMANTIC_MODEL_KEY", "")
    server = EmbeddingServer(asked.model_url, asked.model, key, asked.model_prompt or "")
    taken = []
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(_SERVER_SECONDS):
            for _ in range(1 + _TIMES):
                began = time.perf_counter()
                vector = await server.probe(session)
                taken.append(time.perf_counter() - began)
    except (aiohttp.ClientError, OSError, BadReply, EmbeddingFailed) as error:
        reason = f"the embedding server of {server.name}: {str(error) or 'no answer in time'}"
        _say("problem", reason, "start that server, or correct semantic.model_url, model or model_key")
        return
    said = _speed(server.name, len(vector), taken)
    if min(taken) > asked.deadline / 2:
        said = f"{said}, of {asked.deadline * 1000:g} ms in all"
        _say("warning", said, "set semantic.deadline to twice that or more")
    else:
        _say("ok", said)


def _check_encoder(asked: Asked, cache: Path) -> None:
    """Load the model as the service does, which compares its vectors with those of the reference."""
    reasons: list[str] = []
    encoder = load_encoder(asked.model, cache, asked.model_prompt, warn=reasons.append)
    taken = timeit.repeat(lambda: encoder.encode([_TEXT]), repeat=_TIMES, number=1)
    said = _speed(encoder.name, encoder.dimensions, taken)
    if reasons:
        advice = _COMPILER if "compiler" in reasons[0] else "it is right, and slower"
        _say("warning", f"{said}; {reasons[0]}", advice)
    else:
        _say("ok", f"{said}; {_instructions(cache)} kernels, whose vectors are those of the reference")


def _speed(name: str, dimensions: int, taken: Sequence[float]) -> str:
    return f"{name}, {dimensions} dimensions: {min(taken) * 1000:.1f} ms for a short question"


def _instructions(cache: Path) -> str:
    """What the compiled encoder was built for. Raises NativeUnavailable."""
    return "AVX-512" if native_library(cache).bert_lanes() == _WIDE_LANES else "AVX2"


def _say(status: str, summary: str, advice: str = "") -> None:
    print(json.dumps({"check": "semantic cache", "status": status, "summary": summary, "advice": advice}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(msgspec.json.decode(sys.argv[1], type=Asked))
