"""The same model on ONNX Runtime: without torch, and half the time for a short text."""

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import numpy as np
import onnxruntime

from cache.semantic.embedding.encoder import TextTokens, Tokens, Vectors, unit
from cache.semantic.embedding.errors import ExportUnavailable
from cache.semantic.embedding.manifest import MODEL_FILE, REFERENCE_FILE, Manifest
from cache.semantic.embedding.reference import MIN_COSINE, lowest_cosine

# Tokens of a call, with padding. A matrix of this many rows keeps a core busy; more rows do not fit its caches.
_MAX_TOKENS = 256
_ERRORS_ONLY = 3


class OnnxEncoder:
    """Exported files, checked against the vectors that the reference gave when it was exported."""

    def __init__(self, name: str, fingerprint: str, folder: Path, manifest: Manifest, threads: int) -> None:
        """Raises ExportUnavailable when this machine's runtime does not give the reference's vectors."""
        self._manifest = manifest
        self._tokens = TextTokens(folder, manifest)
        try:
            self._session = _open_session(folder / MODEL_FILE, threads)
            expected: Vectors = np.load(folder / REFERENCE_FILE)
            self.name = f"{name}, ONNX Runtime"
            self.fingerprint = fingerprint
            self.dimensions = expected.shape[1]
            cosine = lowest_cosine(self, manifest.texts, expected)
        # The runtime's own exceptions have no base but this one.
        except Exception as error:
            raise ExportUnavailable(f"ONNX Runtime cannot compute it: {error}") from error
        if cosine < MIN_COSINE:
            raise ExportUnavailable(
                f"on ONNX Runtime its vectors are not those of the reference: lowest cosine {cosine:.6f}, needed"
                f" {MIN_COSINE}"
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
        width = max(len(each.input_ids) for each in tokens)
        shape = (len(tokens), width)
        arrays = {
            "input_ids": np.full(shape, self._manifest.pad_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.full(shape, self._manifest.pad_type_id, np.int64),
        }
        for row, each in enumerate(tokens):
            length = len(each.input_ids)
            columns = slice(width - length, width) if self._manifest.pads_left else slice(0, length)
            arrays["input_ids"][row, columns] = each.input_ids
            arrays["attention_mask"][row, columns] = 1
            arrays["token_type_ids"][row, columns] = each.token_type_ids
        vectors: Vectors = self._session.run(None, {name: arrays[name] for name in self._manifest.inputs})[0]
        return vectors


def _open_session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # A waiting thread sleeps: other threads need the core.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = _ERRORS_ONLY
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _groups(lengths: list[int]) -> Iterator[list[int]]:
    """Indices of texts to compute at once: of like length, so that there is little padding.

    Those of length 0 are in no group.
    """
    order = sorted((index for index, length in enumerate(lengths) if length), key=lengths.__getitem__, reverse=True)
    while order:
        longest = lengths[order[0]]
        shortest = longest - max(1, longest // 8)
        room = max(1, _MAX_TOKENS // longest)
        group = list(takewhile(lambda index: lengths[index] >= shortest, order[:room]))  # noqa: B023  used up at once
        yield group
        order = order[len(group) :]
