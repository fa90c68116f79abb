"""``python -m cache.semantic.evaluation.check MODEL FOLDER``: whether an embedding model could be served, and by what.

``keepgate doctor`` runs it. It prints a JSON object for each finding, with ``check``, ``status`` (ok, warning or
problem), ``summary`` and ``advice``. Nothing is exported: a model without an export is only looked for.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

from cache.semantic.embedding.errors import EmbeddingError, ModelUnusable, NativeUnavailable
from cache.semantic.embedding.export_cache import export_folder
from cache.semantic.embedding.load import load_encoder
from cache.semantic.embedding.model_files import ModelFiles, find_model
from cache.semantic.embedding.native_build import native_library

_CHECK = "semantic cache"
_TEXT = "What is the capital of France?"
_TIMES = 5
_WIDE_LANES = 16
_COMPILER = "install g++ (Debian: apt-get install g++), or name a compiler with CXX"


class _Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main(words: list[str]) -> int:
    """Print the findings; returns the exit status."""
    model, cache = words[0], Path(words[1])
    try:
        files = find_model(model)
        fingerprint = files.fingerprint()
        if export_folder(fingerprint, cache).exists():
            _check_encoder(model, cache)
        else:
            _say("ok", f"{files.name} is there; it is exported at the first start, which takes half a minute")
            _check_native(files, cache)
    except ModelUnusable as error:
        _say("problem", str(error), "do what the message says, or set semantic.mode to off")
    except EmbeddingError as error:
        _say("warning", f"torch computes the vectors, ten times slower: {error}", "do what the message says")
    return 0


def _check_encoder(model: str, cache: Path) -> None:
    """Load the model as the service does, which compares its vectors with those of the reference."""
    messages = _Messages()
    log = logging.getLogger("cache.semantic.embedding")
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    log.propagate = False
    encoder = load_encoder(model, cache)
    taken = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        encoder.encode([_TEXT])
        taken.append(time.perf_counter() - began)
    said = f"{encoder.name}, {encoder.dimensions} dimensions: {min(taken) * 1000:.1f} ms for a short question"
    if messages.said:  # a faster runtime was passed over
        reason = messages.said[-1]
        _say("warning", f"{said}; {reason}", _COMPILER if "compiler" in reason else "it is right, and slower")
    else:
        _say("ok", f"{said}; {_instructions(cache)} kernels, whose vectors are those of the reference")


def _check_native(files: ModelFiles, cache: Path) -> None:
    try:
        _say("ok", f"{_instructions(cache)} kernels are built; {files.name} is compared with torch when it is exported")
    except NativeUnavailable as reason:
        _say("warning", f"the compiled encoder cannot be built, ONNX Runtime will serve: {reason}", _COMPILER)


def _instructions(cache: Path) -> str:
    """What the compiled encoder was built for. Raises NativeUnavailable."""
    lanes = native_library(cache).bert_lanes()
    return "AVX-512" if lanes == _WIDE_LANES else "AVX2"


def _say(status: str, summary: str, advice: str = "") -> None:
    print(json.dumps({"check": _CHECK, "status": status, "summary": summary, "advice": advice}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
