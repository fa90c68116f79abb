"""Which files a model is, as far as it takes to notice that they are others than before."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from backend.model_source import MODEL_FILES


def source_files(directory: Path) -> dict[str, str]:
    """By name, what can be told of each without reading it: its size and when it was written.

    What else lies beside them (notes, logs, an editor's files) is not the model.
    """
    paths = (path for path in sorted(directory.iterdir()) if any(fnmatchcase(path.name, of) for of in MODEL_FILES))
    files = {path.name: path.stat() for path in paths if not path.name.startswith(".") and path.is_file()}
    return {name: f"of {about.st_size} bytes and {about.st_mtime_ns} ns" for name, about in files.items()}
