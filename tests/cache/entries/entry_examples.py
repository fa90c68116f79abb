"""Entries for tests."""

import time
from typing import Any

from cache.entries.entry import Entry
from tests.waiting import until

__all__ = ["entry", "until"]


def entry(entry_id: str = "public.aa", **fields: Any) -> Entry:
    """A whole entry; `fields` replace what matters to the test."""
    values: dict[str, Any] = {
        "id": entry_id,
        "proof": b"p" * 16,
        "family": "chat.completions",
        "model": "m",
        "body": b'{"choices":[]}',
        "created": time.time(),
        "fresh_for": 60.0,
        "generation": "0.0.0",
        "has_usage": True,
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "seconds": 0.25,
    }
    return Entry(**{**values, **fields})
