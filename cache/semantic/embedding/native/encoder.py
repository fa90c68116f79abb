"""BERT models in `bert.cpp`: a sixth of torch's time for a short text (docs/decisions/013-embedding-runtime.md).

The machine's own compiler builds it, once, into a folder of the user's cache.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import Encoding

from cache.semantic.embedding.encoder import Vectors, unit, well_formed
from cache.semantic.embedding.errors import NativeUnavailable
from cache.semantic.embedding.model_files import ModelFiles, make_file
from cache.semantic.embedding.native.bert import aligned, packed_model, read_bert

_SOURCE = Path(__file__).with_name("bert.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
_LONGEST_BUILD = 120
# Tokens of a call, beside those of its first text: its numbers fit in a core's second-level cache.
_MAX_TOKENS = 256


class NativeEncoder:
    """One thread per call; weights are integers of 12 bits.

    A vector is bitwise the same alone and in any batch.
    """

    def __init__(self, files: ModelFiles, cache: Path) -> None:
        """Raises NativeUnavailable if the model, its weights or the machine do not fit.

        Args:
            cache: folder of the library.
        """
        bert = read_bert(files.folder)
        self._library = native_library(cache)
        self._library.bert_work_bytes.restype = ctypes.c_int64
        self._shape = bert.shape
        self._weights = packed_model(bert, 2 * self._library.bert_lanes(), self._library.bert_activation_max())
        self._prompt = files.prompt
        self._tokenizer = bert.tokenizer
        self.name = f"{files.name}, compiled"
        self.fingerprint = files.fingerprint()
        self.dimensions = bert.config.hidden_size

    def encode(self, texts: list[str]) -> Vectors:
        """Raises ValueError if a token is not in the model's tables."""
        encodings = [self._tokenizer.encode(well_formed(self._prompt + text)) for text in texts]
        # A call has the texts that end within the same _MAX_TOKENS of all.
        ends = itertools.accumulate(map(len, encodings))
        calls = itertools.groupby(zip(encodings, ends, strict=True), lambda each: each[1] // _MAX_TOKENS)
        none = np.empty((0, self.dimensions), np.float32)
        return unit(np.vstack([none, *(self._compute([encoding for encoding, _ in call]) for _, call in calls)]))

    def _compute(self, encodings: list[Encoding]) -> Vectors:
        """Not of length 1 yet."""
        starts = np.cumsum([0, *map(len, encodings)], dtype=np.int32)
        token_ids = np.array([number for each in encodings for number in each.ids], np.int32)
        type_ids = np.array([number for each in encodings for number in each.type_ids], np.int32)
        work = aligned(self._library.bert_work_bytes(self._shape, len(encodings), starts.ctypes))
        vectors = np.empty((len(encodings), self.dimensions), np.float32)
        arrays = (starts, token_ids, type_ids, work, vectors)
        failed = self._library.bert_encode(
            self._shape, self._weights.ctypes, len(encodings), *(array.ctypes for array in arrays)
        )
        if failed:
            raise ValueError("the tokenizer gives numbers that the model has no row for")
        return vectors


def native_library(cache: Path) -> ctypes.CDLL:
    """The library, built in some seconds if this machine has not built this source yet.

    Args:
        cache: folder of the library; machines of different kinds may share it.

    Raises:
        NativeUnavailable: no compiler, a failed compilation (a CPU without the instructions), or a full disk.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NativeUnavailable("no C++ compiler (g++, or what CXX names) on PATH")
    try:
        target = cache / f"bert-{_digest(compiler)}.so"
        if not target.is_file():
            make_file(target, compiler, (compiler, *_FLAGS, str(_SOURCE), "-o"), _LONGEST_BUILD)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeUnavailable(f"it cannot be built or loaded: {error}") from error


def _digest(compiler: str) -> str:
    """The name of the build: a digest of source, flags, compiler and CPU features."""
    # Its predefined macros have its version, and each feature that -march=native finds.
    macros = subprocess.run(  # noqa: S603  the user's compiler
        [compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=False
    ).stdout
    return xxhash.xxh3_128_hexdigest("\0".join((_SOURCE.read_text("utf-8"), *_FLAGS, macros)).encode())
