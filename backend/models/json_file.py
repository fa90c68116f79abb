"""Reads the JSON files of a model directory, which may come from anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backend.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        ModelError: the file cannot be read, is not JSON, or holds something else than an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return values
