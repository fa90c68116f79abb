"""Typed access to a parsed ``config.json`` with errors that name file, field, value and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.errors import ModelError


class Fields:
    """The fields of one object of a file; each method raises ``ModelError`` for a value of the wrong kind."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def error(self, field: str, expected: str) -> ModelError:
        return ModelError(f"{self.source}: {field} is {self.values.get(field)!r}, expected {expected}")

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

    def count(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, "a positive integer")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.values.get(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(field, "a positive number")
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
