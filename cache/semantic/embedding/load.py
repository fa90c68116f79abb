"""The configured embedding model, compiled where that gives the vectors of sentence-transformers."""

import logging
from pathlib import Path

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.errors import ModelUnusable, NativeUnavailable
from cache.semantic.embedding.model_files import SETTING, find_model

log = logging.getLogger(__name__)


def load_encoder(model: str, cache: Path, prompt: str | None = None) -> Encoder:
    """The encoder of a model, ready. Blocks: seconds, and about half a minute the first time on a machine.

    Args:
        model: "default", a folder, or the name of a model in this machine's hub cache.
        cache: folder of the compiled library and of reference vectors; made if missing.
        prompt: put before every text; None for what the model's own files say.

    Raises:
        ModelUnusable: the model is not there or cannot be read, or the packages that it needs are not installed.
    """
    files = find_model(model, prompt)
    fingerprint = files.fingerprint()
    try:
        try:
            from cache.semantic.embedding.native.encoder import NativeEncoder

            return NativeEncoder(files, fingerprint, cache)
        except NativeUnavailable as reason:
            log.warning("%s: %s is computed by torch; the compiled encoder: %s", SETTING, files.name, reason)
        # Imported where it is needed: torch takes seconds and hundreds of megabytes.
        from cache.semantic.embedding.torch_encoder import TorchEncoder

        return TorchEncoder(files, fingerprint)
    except ImportError as error:
        raise ModelUnusable(
            f"{SETTING}: {error}; install the extra: pip install 'keepgate[semantic]', or switch the semantic cache off"
        ) from error
