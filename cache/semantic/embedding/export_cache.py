"""Exported models, kept on disk: each is made once, by a process of its own, and published atomically."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from cache.semantic.embedding.errors import ExportUnavailable
from cache.semantic.embedding.manifest import FORMAT, Damaged, Manifest, read_manifest
from cache.semantic.embedding.model_files import ModelFiles

log = logging.getLogger(__name__)

_EXPORTERS = ("torch", "transformers", "sentence-transformers", "tokenizers", "onnx", "onnxscript")
_LONGEST_EXPORT = 900.0


def exported(files: ModelFiles, fingerprint: str, cache: Path) -> tuple[Path, Manifest]:
    """The folder of a model's exported files, and its manifest; exported first, in up to a minute, if missing.

    Args:
        fingerprint: of the files.
        cache: folder of all exports; made if missing.

    Raises:
        ExportUnavailable: the model cannot be exported, or its export cannot be kept; the message says which.
    """
    folder = export_folder(fingerprint, cache)
    try:
        if folder.exists():
            try:
                return folder, read_manifest(folder)
            except Damaged as damage:
                log.warning("exporting %s again: %s", files.name, damage)
                _remove(folder)
        _make(files, folder)
        return folder, read_manifest(folder)
    except (OSError, Damaged) as error:
        raise ExportUnavailable(f"its export cannot be kept in {cache}: {error}") from error


def export_folder(fingerprint: str, cache: Path) -> Path:
    """The folder of a model's export: another model, another exporter or another format has another one.

    Raises ExportUnavailable when a package that exports is not installed.
    """
    try:
        made_by = " ".join(f"{name}={version(name)}" for name in _EXPORTERS)
    except PackageNotFoundError as error:
        raise ExportUnavailable(
            f"the package {error.name} is not installed, which the export needs; install the extra:"
            " pip install 'keepgate[semantic]'"
        ) from error
    return cache / xxhash.xxh3_128_hexdigest(f"{fingerprint} format={FORMAT} {made_by}".encode())


def _make(files: ModelFiles, folder: Path) -> None:
    log.info("exporting %s for ONNX Runtime, once, into %s", files.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _run(files, work)
        work.chmod(0o755)
        publish(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def publish(work: Path, folder: Path) -> None:
    """Renames a finished folder to its name, atomically; if another process was faster, its files stay."""
    try:
        work.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _run(files: ModelFiles, target: Path) -> None:
    # A process of its own: torch and the exporter take a gigabyte that a serving process would never release. -P: the
    # program is the installed one, not one in the current directory.
    program = (sys.executable, "-P", "-m", "cache.semantic.embedding.export")
    prompt = () if files.prompt is None else (f"--prompt={files.prompt}",)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        # torch leaves a folder among the temporary files.
        with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as temporary:
            done = subprocess.run(  # noqa: S603  our own program
                [*program, *prompt, files.name, str(files.folder), str(target)],
                env={**environment, "TMPDIR": temporary}, timeout=_LONGEST_EXPORT, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", check=False,
            )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ExportUnavailable(f"its export took more than {_LONGEST_EXPORT:.0f} s") from error
    if done.returncode != 0:
        # The last line of a traceback is the error; of a message, the message.
        reason = next(reversed(done.stderr.split("\n")[:-1]), "") if done.stderr else ""
        raise ExportUnavailable(f"its export ended with {done.returncode}: {reason or 'no message'}")


def _remove(folder: Path) -> None:
    # Renamed first: a partly removed folder is never visible under its name.
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    folder.rename(aside)
    shutil.rmtree(aside)


def _remove_leftovers(folder: Path) -> None:
    # Of a process that was killed while it exported. A running one has younger files.
    oldest = time.time() - _LONGEST_EXPORT
    for path in folder.parent.glob(f".{folder.name}-*"):
        if path.stat().st_mtime < oldest:
            shutil.rmtree(path, ignore_errors=True)
