"""The configured embedding model, on the fastest runtime that gives the reference's vectors."""

import logging
from pathlib import Path

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.errors import ExportUnavailable, ModelUnusable, NativeUnavailable
from cache.semantic.embedding.export_cache import exported
from cache.semantic.embedding.model_files import SETTING, ModelFiles, find_model

log = logging.getLogger(__name__)


def load_encoder(model: str, cache: Path, threads: int = 1, prompt: str | None = None) -> Encoder:
    """The encoder of a model, ready. Blocks: seconds, and about half a minute when the model is exported first.

    Args:
        model: "default", a folder, or the name of a model in this machine's hub cache.
        cache: folder where exported models are kept.
        threads: of one computation; the compiled encoder always has one.
        prompt: put before every text; None for what the model's own files say.

    Raises:
        ModelUnusable: the model is not there or cannot be read, or the packages that it needs are not installed.
    """
    files = find_model(model, prompt)
    fingerprint = files.fingerprint()
    try:
        return _of_export(files, fingerprint, cache, threads)
    except ExportUnavailable as reason:
        log.warning("%s: %s is computed by torch, slower than need be: %s", SETTING, files.name, reason)
    try:
        # Imported where it is needed: torch takes seconds and hundreds of megabytes.
        from cache.semantic.embedding.torch_encoder import TorchEncoder
    except ImportError as error:
        raise ModelUnusable(
            f"{SETTING}: {error}; install the extra: pip install 'keepgate[semantic]', or switch the semantic cache off"
        ) from error
    return TorchEncoder(files, fingerprint, threads)


def _of_export(files: ModelFiles, fingerprint: str, cache: Path, threads: int) -> Encoder:
    folder, manifest = exported(files, fingerprint, cache)
    try:
        try:
            from cache.semantic.embedding.native.encoder import NativeEncoder

            return NativeEncoder(files, fingerprint, folder, manifest)
        except NativeUnavailable as reason:
            log.info("%s: %s is computed by ONNX Runtime; the compiled encoder: %s", SETTING, files.name, reason)
        from cache.semantic.embedding.onnx_encoder import OnnxEncoder
    except ImportError as error:
        raise ExportUnavailable(f"{error}; install the extra: pip install 'keepgate[semantic]'") from error
    return OnnxEncoder(files.name, fingerprint, folder, manifest, threads)
