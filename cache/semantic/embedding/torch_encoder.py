"""The reference: sentence-transformers itself, on torch."""

import os
import threading

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from cache.semantic.embedding.encoder import Vectors, unit, well_formed
from cache.semantic.embedding.errors import ModelUnusable
from cache.semantic.embedding.model_files import SETTING, ModelFiles

_CHARACTERS_OF_TOKEN = 4


class TorchEncoder:
    """For any model; about twice as slow as ONNX Runtime for one short text."""

    def __init__(self, files: ModelFiles, fingerprint: str, threads: int) -> None:
        """Raises ModelUnusable when sentence-transformers cannot read the model. Sets the process's torch threads."""
        # Read when the tokenizer is first used: its pool would take every core of the machine.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        torch.set_num_threads(threads)
        self._model = open_model(files)
        # Each call sets the tokenizer's padding, so calls must not overlap.
        self._turn = threading.Lock()
        self.name = f"{files.name}, torch"
        self.fingerprint = fingerprint
        self.dimensions = self.encode([""]).shape[1]

    def length(self, text: str) -> int:
        return min(len(text) // _CHARACTERS_OF_TOKEN + 2, self._model.max_seq_length or len(text) + 2)

    def encode(self, texts: list[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimensions), np.float32)
        with self._turn:
            vectors = self._model.encode([well_formed(text) for text in texts], show_progress_bar=False)
        return unit(np.asarray(vectors, np.float32))


def open_model(files: ModelFiles) -> SentenceTransformer:
    """The model of a folder, ready to compute on the CPU. Raises ModelUnusable; never fetches, never runs its code."""
    try:
        model = SentenceTransformer(str(files.folder), device="cpu", local_files_only=True)
    # The library and its file formats raise any exception.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelUnusable(
            f"{SETTING}: sentence-transformers cannot load {files.name!r} from {files.folder}: {reason}"
        ) from error
    if files.prompt is not None:
        model.prompts, model.default_prompt_name = {"query": files.prompt}, "query"
    return model.eval()
