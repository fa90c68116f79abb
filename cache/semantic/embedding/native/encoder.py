"""BERT models in `bert.cpp`: two fifths of ONNX Runtime's time for a short text."""

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache.semantic.embedding.encoder import TextTokens, Tokens, Vectors, unit
from cache.semantic.embedding.errors import NativeUnavailable
from cache.semantic.embedding.manifest import REFERENCE_FILE, Manifest
from cache.semantic.embedding.model_files import ModelFiles
from cache.semantic.embedding.native.bert_files import bert_shape, bert_weights
from cache.semantic.embedding.native.build import native_library
from cache.semantic.embedding.native.layout import BertLayout
from cache.semantic.embedding.reference import MIN_COSINE, lowest_cosine

# Tokens of a call, unless a single text has more: its numbers fit in a core's second-level cache.
_MAX_TOKENS = 256
_ALIGNMENT = 64
_INT32, _INT64, _FLOAT, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class NativeEncoder:
    """One thread per call; weights are integers of 12 bits; checked against the reference's vectors.

    A vector is bitwise the same alone and in any batch.
    """

    def __init__(self, files: ModelFiles, fingerprint: str, folder: Path, manifest: Manifest) -> None:
        """Raises NativeUnavailable if the model, its weights or the machine do not fit, or vectors differ.

        Args:
            folder: of the export; the library is kept beside it.
        """
        shape = bert_shape(files.folder)
        self._library = native_library(folder.parent)
        self._library.bert_work_bytes.restype = _INT64
        self._library.bert_work_bytes.argtypes = (_POINTER, _INT32, _INT32)
        self._library.bert_encode.argtypes = (_POINTER, _INT32, *[_POINTER] * 5)
        self._library.bert_activation_max.restype = _FLOAT
        lanes, activation_max = self._library.bert_lanes(), int(self._library.bert_activation_max())
        self._layout = BertLayout(shape, bert_weights(files.folder), lanes, activation_max)
        self._model = ctypes.addressof(self._layout.model)
        self._work = _Work()
        self._tokens = TextTokens(folder, manifest)
        self.name = f"{files.name}, compiled"
        self.fingerprint = fingerprint
        self.dimensions = shape.hidden_size
        try:
            expected: Vectors = np.load(folder / REFERENCE_FILE)
            cosine = lowest_cosine(self, manifest.texts, expected)
        except (OSError, ValueError) as error:
            raise NativeUnavailable(f"it cannot compute the reference's texts: {error}") from error
        if not cosine >= MIN_COSINE:
            raise NativeUnavailable(
                f"its vectors are not those of the reference: lowest cosine {cosine:.6f}, needed {MIN_COSINE}"
            )

    def length(self, text: str) -> int:
        return len(self._tokens.read(text).input_ids)

    def encode(self, texts: list[str]) -> Vectors:
        vectors = np.full((len(texts), self.dimensions), np.nan, np.float32)
        tokens = [self._tokens.read(text) for text in texts]
        for group in _groups([len(each.input_ids) for each in tokens]):
            vectors[group] = self._compute([tokens[index] for index in group])
        return unit(vectors)

    def _compute(self, tokens: list[Tokens]) -> Vectors:
        """Raises ValueError if a token is not in the model's tables."""
        lengths = [len(each.input_ids) for each in tokens]
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        input_ids = np.array([number for each in tokens for number in each.input_ids], np.int32)
        token_type_ids = np.array([number for each in tokens for number in each.token_type_ids], np.int32)
        vectors = np.empty((len(tokens), self.dimensions), np.float32)
        failed = self._library.bert_encode(
            self._model,
            len(tokens),
            *(array.ctypes.data for array in (starts, input_ids, token_type_ids)),
            self._memory(int(starts[-1]), max(lengths)),
            vectors.ctypes.data,
        )
        if failed:
            raise ValueError("the tokenizer gives numbers that the model has no row for")
        return vectors

    def _memory(self, tokens: int, longest: int) -> int:
        """Address of this thread's work space, kept for its next call."""
        needed = self._library.bert_work_bytes(self._model, tokens, longest) + _ALIGNMENT
        if self._work.memory.nbytes < needed:
            self._work.memory = np.empty(needed, np.uint8)
        address: int = self._work.memory.ctypes.data
        return address + -address % _ALIGNMENT


class _Work(threading.local):
    """Each thread has its own."""

    def __init__(self) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


def _groups(lengths: list[int]) -> Iterator[list[int]]:
    """Indices of texts to compute at once. Those of length 0 are in no group."""
    group: list[int] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if group and tokens + length > _MAX_TOKENS:
            yield group
            group, tokens = [], 0
        if length:
            group.append(index)
            tokens += length
    if group:
        yield group
