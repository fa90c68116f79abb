"""The reference: sentence-transformers itself, on torch."""

import os
import threading

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from cache.semantic.embedding.encoder import Vectors, unit, well_formed
from cache.semantic.embedding.errors import ModelUnusable
from cache.semantic.embedding.model_files import SETTING, ModelFiles


class TorchEncoder:
    """For any model; a short text takes several times as long as with the compiled encoder."""

    def __init__(self, files: ModelFiles, fingerprint: str) -> None:
        """Raises ModelUnusable when sentence-transformers cannot read the model. Sets the process's torch threads.

        It never fetches anything, and never runs code of the model's folder.
        """
        # Read when the tokenizer is first used: its pool would take every core of the machine.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        torch.set_num_threads(1)
        self.name = f"{files.name}, torch"
        self.fingerprint = fingerprint
        self._prompt = files.prompt
        # Each call sets the tokenizer's padding, so calls must not overlap.
        self._turn = threading.Lock()
        try:
            self._model = SentenceTransformer(str(files.folder), device="cpu", local_files_only=True).eval()
            if (longest := self._model.max_seq_length) is not None and longest < 0:
                raise ValueError(
                    f"max_seq_length is {longest} in its sentence_bert_config.json; it must be how many tokens it reads"
                )
            self.dimensions = self.encode([""]).shape[1]
        # The library and its file formats raise any exception.
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise ModelUnusable(
                f"{SETTING}: sentence-transformers cannot load {files.name!r} from {files.folder}: {reason}"
            ) from error

    def encode(self, texts: list[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dimensions), np.float32)
        with self._turn:
            vectors = self._model.encode(
                [well_formed(text) for text in texts], prompt=self._prompt, show_progress_bar=False
            )
        return unit(np.asarray(vectors, np.float32))
