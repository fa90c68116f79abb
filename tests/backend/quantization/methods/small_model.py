"""A small random model in a directory, with a tokenizer that makes every byte a token, and a text."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.backend.random_models import KINDS, Kind, save

BYTES = 256


def save_small_model(directory: Path, kind: Kind | None = None) -> None:
    """With inputs that groups of 32 and 64 divide, and one kind of matrix that they do not."""
    save(kind or KINDS["smollm2"], directory)
    (directory / "tokenizer.json").write_text(json.dumps(_byte_tokenizer()))


def save_text(path: Path, words: int = 2000) -> None:
    """Words of letters that are drawn evenly."""
    draw = random.Random(7)  # noqa: S311 - no secret
    path.write_text(" ".join("".join(draw.choices("abcdefgh", k=draw.randint(1, 9))) for _ in range(words)))


def _byte_tokenizer() -> dict[str, object]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    letters = {**{byte: chr(byte) for byte in printable}, **{byte: chr(BYTES + n) for n, byte in enumerate(others)}}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(BYTES)}, "merges": []},
    }
