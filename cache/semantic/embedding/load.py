"""The configured embedding model: compiled, or on torch where that does not give the vectors of sentence-transformers.

``python -m cache.semantic.embedding.load NAME MODEL_FOLDER PROMPT FILE.npy`` writes the vectors to compare with.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from cache.semantic.embedding.encoder import Encoder, Vectors, unit, well_formed
from cache.semantic.embedding.errors import ModelUnusable, NativeUnavailable
from cache.semantic.embedding.model_files import SETTING, ModelFiles, find_model, make_file

log = logging.getLogger(__name__)

_MIN_COSINE = 0.9999
_SENTENCE = "Where is my card {}, and why was I charged {}.50 for it twice on the 3rd of May? "
# Short ones with unusual characters, and such as end within, at and beyond the limit of most models.
_TEXTS = [
    "",
    "a",
    " leading and trailing space ",
    "How do I top up my account?",
    "HOW DO I TOP UP MY ACCOUNT?",
    "naïve café, Ünïcödé ﬁne print, \uff21 fullwidth letter",
    "我的银行卡在哪里\uff1f 今日はいい天気ですね。",
    "Где моя карта? أين بطاقتي؟ मेरा कार्ड कहाँ है",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301\u200b\u00ad\x00\x07 \ufffd",
    "[CLS] [SEP] [MASK] <s> </s> <|endoftext|> ##ing",
    "def f(x):\n\treturn x[::-1]  # != y\r\n",
    "supercalifragilisticexpialidocious" * 8,
    *("".join(_SENTENCE.format(number, number) for number in range(count)) for count in (2, 10, 40)),
]
_LONGEST_SECONDS = 600


def load_encoder(
    model: str, cache: Path, prompt: str | None = None, warn: Callable[[str], None] = log.warning
) -> Encoder:
    """The encoder of a model, ready. Blocks: seconds, and about half a minute the first time on a machine.

    Args:
        model: "default", a folder, or the name of a model in this machine's hub cache.
        cache: folder of the compiled library and of reference vectors; made if missing.
        prompt: put before every text; None for what the model's own files say.
        warn: is told why the compiled encoder does not serve the model.

    Raises:
        ModelUnusable: the model is not there or cannot be read, or the packages that it needs are not installed.
    """
    try:
        files = find_model(model, prompt)
        try:
            from cache.semantic.embedding.native.encoder import NativeEncoder

            native = NativeEncoder(files, cache)
            check_against_reference(native, files, cache)
            return native
        except NativeUnavailable as reason:
            warn(f"{SETTING}: {files.name} is computed by torch; the compiled encoder: {reason}")
        return TorchEncoder(files)
    except ImportError as error:
        raise ModelUnusable(
            f"{SETTING}: {error}; install the extra: pip install 'keepgate[semantic]', or switch the semantic cache off"
        ) from error


class TorchEncoder:
    """The reference, sentence-transformers itself: for any model.

    It takes several times as long for a short text as the compiled encoder.
    """

    def __init__(self, files: ModelFiles) -> None:
        """Raises ModelUnusable when sentence-transformers cannot read the model. Sets the process's torch threads.

        It never fetches anything, and never runs code of the model's folder.
        """
        # Read when the tokenizer is first used: its pool would take every core of the machine.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Imported where they are needed: they take seconds and hundreds of megabytes.
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        self.name = f"{files.name}, torch"
        self.fingerprint = files.fingerprint()
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


def check_against_reference(encoder: Encoder, files: ModelFiles, cache: Path) -> None:
    """Raises NativeUnavailable unless an encoder gives the vectors of sentence-transformers, to a cosine of .9999.

    Each text is computed alone and among all others. The reference is computed once, by a process of its own, since
    torch takes hundreds of megabytes that a serving process would never release, and kept in `cache`.
    """
    path = reference_file(encoder.fingerprint, cache)
    try:
        try:
            expected: Vectors = np.load(path)
        except (OSError, ValueError, EOFError):  # it is not there yet, or damaged
            # -P: the program is the installed one, not one in the current directory.
            program = (sys.executable, "-P", "-m", __name__, files.name, str(files.folder), files.prompt)
            make_file(path, "its reference", program, _LONGEST_SECONDS)
            expected = np.load(path)
        together, alone = encoder.encode(_TEXTS), np.vstack([encoder.encode([text]) for text in _TEXTS])
    except (OSError, ValueError) as error:
        raise NativeUnavailable(f"it cannot be compared with the reference: {error}") from error
    cosine = min(_lowest_cosine(vectors, expected) for vectors in (together, alone))
    if not cosine >= _MIN_COSINE:
        raise NativeUnavailable(
            f"its vectors are not those of the reference: lowest cosine {cosine:.6f}, needed {_MIN_COSINE}"
        )


def reference_file(fingerprint: str, cache: Path) -> Path:
    """Where the reference of a model is kept."""
    return cache / f"reference-{xxhash.xxh3_128_hexdigest(chr(0).join((fingerprint, *_TEXTS)).encode())}.npy"


def _lowest_cosine(vectors: Vectors, expected: Vectors) -> float:
    """Of unit vectors in the same rows; 0 if shapes differ or only one row of a pair is NaN, else NaN rows agree."""
    if vectors.shape != expected.shape or not (np.isnan(vectors) == np.isnan(expected)).all():
        return 0.0
    cosines = (vectors.astype(np.float64) * expected).sum(axis=1)
    return float(np.min(cosines, where=~np.isnan(cosines), initial=1.0))


if __name__ == "__main__":
    name, folder, prompt, output = sys.argv[1:]
    reference = TorchEncoder(ModelFiles(name, Path(folder), prompt))
    np.save(output, np.vstack([reference.encode([text]) for text in _TEXTS]))
