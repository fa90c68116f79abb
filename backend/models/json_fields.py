"""Typed access to a parsed ``config.json`` with errors that name file, field, value and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import Repr
from typing import Any

from backend.errors import ModelError

# Files come from anywhere, and what is read of them is counted, allocated and looped over before a tensor is looked at.
# Far beyond every model there is, and small enough for that.
MAX_TOKENS = 2**22
"""Of a vocabulary: the largest have some 260,000."""
MAX_LAYERS = 4096
"""The deepest have some 130."""
_MAX_COUNT = 2**31 - 1
"""Of anything else that is counted: what the computed positions and sizes are kept in."""
_MIN_NUMBER, _MAX_NUMBER = 1e-12, 1e12
"""Of what is computed with in float32, where products of a few of these are numbers still."""

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlong = 40
_SHORT.maxlist = _SHORT.maxdict = 8


class Fields:
    """The fields of one object of a file; each method raises ``ModelError`` for a value of the wrong kind."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def error(self, field: str, expected: str) -> ModelError:
        # Part of where it is may be a name out of the file, such as a group's.
        source = "".join(letter if letter.isprintable() else "?" for letter in self.source)
        return ModelError(f"{source}: {field} is {_SHORT.repr(self.values.get(field))}, expected {expected}")

    def text(self, field: str) -> str:
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self.error(field, "a string")
        return value

    def flag(self, field: str) -> bool:
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, "true or false")
        return bool(value)

    def count(self, field: str, default: int | None = None, most: int = _MAX_COUNT) -> int:
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, "a positive integer")
        if value > most:
            raise self.error(field, f"at most {most}")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.values.get(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(field, "a positive number")
        if not _MIN_NUMBER <= value <= _MAX_NUMBER:
            raise self.error(field, f"from {_MIN_NUMBER:g} to {_MAX_NUMBER:g}")
        return float(value)

    def optional_number(self, field: str) -> float | None:
        return None if self.values.get(field) is None else self.number(field, 0.0)

    def per_layer(self, field: str, num_layers: int, allowed: tuple[Any, ...]) -> list[Any] | None:
        """One of the allowed values for each layer; None where the field is absent. More layers than the model's
        own are ignored, as transformers does."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < num_layers or any(item not in allowed for item in value):
            raise self.error(field, f"a list of {num_layers} values out of {', '.join(map(repr, allowed))}")
        return value[:num_layers]

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        value = self.values.get(field)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size for item in ids):
            raise self.error(field, f"a token id or a list of token ids, from 0 to {vocab_size - 1}")
        return tuple(ids)
