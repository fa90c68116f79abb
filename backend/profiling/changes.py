"""The changes of settings that a profile can try: their names, and what each of them is. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Literal, cast, get_args

Change = Literal["int8", "int4", "fp8", "nf4", "batch", "prefix-store"]
CHANGES: tuple[Change, ...] = get_args(Change)
USUAL_CHANGES: tuple[Change, ...] = ("int8", "int4", "batch", "prefix-store")
ABOUT: dict[Change, str] = {
    "int8": "weights of eight bits, which change answers a little: `keepgate eval` says how much",
    "int4": "weights of four bits, which change answers: `keepgate eval` says how much",
    "fp8": "weights of eight bits, floats, which change answers a little: `keepgate eval` says how much",
    "nf4": "weights of four bits, which change answers: `keepgate eval` says how much",
    "batch": "twice as many requests at a time",
    "prefix-store": "a prefix store in host memory, for prompts that come again after others have taken the engine's "
    "KV blocks, or after a restart",
}


def changes(text: str) -> tuple[Change, ...]:
    """The changes that a command line names, separated by commas; ``all`` is the usual ones.

    Raises:
        argparse.ArgumentTypeError: one of them is none.
    """
    if text == "all":
        return USUAL_CHANGES
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in CHANGES:
            raise argparse.ArgumentTypeError(f"{name!r} is no change, expected all or some of {','.join(CHANGES)}")
    return cast(tuple[Change, ...], tuple(dict.fromkeys(names)))
