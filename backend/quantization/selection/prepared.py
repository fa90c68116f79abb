"""Quantises models once, calibrated on a text, and caches them for later starts."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import xxhash

from backend.errors import ModelError
from backend.model_loader.source import ModelSource, cache_directory, source_files
from backend.model_loader.weights import read_config
from backend.quantization.methods.recipe import REVISION, Recipe
from backend.quantized_weights.int_scheme import IntScheme

RECIPES: Mapping[str, Recipe] = {
    "gptq-int4": Recipe("gptq", IntScheme(4, 128)),
    "awq-int4": Recipe("awq", IntScheme(4, 128, "integer")),
    "mixed": Recipe("mixed", IntScheme(4, 32, "integer"), average_bits=5.5),
}
"""By ``--quantization`` name; ``keepgate quantize`` has all the options and takes other texts."""

_TEXT = Path(__file__).parents[1] / "calibration" / "wikitext-2-valid.txt.gz"
_WINDOWS, _WINDOW_TOKENS = 128, 512


def prepared(source: ModelSource, name: str, progress: Callable[[str], None]) -> ModelSource:
    """The model quantised by a recipe of ``RECIPES``, under its own name; made first if it is missing.

    Raises:
        ModelError: it cannot be read, quantised or written.
    """
    models = cache_directory() / "quantized"
    target = models / f"{_identity(source.directory)}-{name}-v{REVISION}"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f"{target.name}.lock", progress):
            if not target.is_dir():
                progress(f"--quantization {name}: quantising {source.name} once, into {target}")
                _quantize(source.directory, target, RECIPES[name], progress)
    except OSError as error:
        raise ModelError(f"--quantization {name}: {target} cannot be written ({error.strerror})") from error
    return replace(source, directory=target)


def _quantize(source: Path, target: Path, recipe: Recipe, progress: Callable[[str], None]) -> None:
    from backend.chat.tokenizer import ModelTokenizer
    from backend.quantization.calibration.text import token_windows
    from backend.quantization.methods.quantize import Quantization

    config = read_config(source)
    tokenizer = ModelTokenizer.load(source, config).fast
    tokens = token_windows(tokenizer, _TEXT, _WINDOWS, _WINDOW_TOKENS, rows=config.vocab_size)
    Quantization(source, target, recipe, tokens).run(progress)


def _identity(directory: Path) -> str:
    """Of a directory: a digest of its path and of the files' names, sizes and times."""
    digest = xxhash.xxh3_64(str(directory.resolve()).encode())
    for name, about in source_files(directory).items():
        digest.update(f"\0{name}\0{about}".encode())
    return f"{directory.resolve().name}-{digest.hexdigest()}"


@contextmanager
def _lock(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is quantising this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
