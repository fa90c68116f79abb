"""Where exported and compiled embedding models are kept."""

import os
from pathlib import Path


def models_folder() -> Path:
    """In the user's cache (XDG base directory specification), for whoever embeds: the service, commands, benchmarks."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "keepgate" / "embedding"
