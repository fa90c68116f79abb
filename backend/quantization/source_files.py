"""Which files a model is, as far as it takes to notice that they are others than before."""

from __future__ import annotations

from pathlib import Path

_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Of what is read of a model, or goes along with it where it is quantised."""


def source_files(directory: Path) -> dict[str, str]:
    """By name, what can be told of each without reading it: its size and when it was written."""
    files = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.suffix in _SUFFIXES}
    return {name: f"of {about.st_size} bytes and {about.st_mtime_ns} ns" for name, about in files.items()}
