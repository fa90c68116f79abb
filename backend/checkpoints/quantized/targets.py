"""Which modules a field of ``quantization_config`` means."""

from __future__ import annotations

from backend.checkpoints.quantized.pattern import Pattern
from backend.checkpoints.tensor_store import decoder_name
from backend.models.json_fields import Fields

_CLASS = "Linear"
"""Of all modules that can be asked for."""


class Targets:
    """A list of names, of patterns after ``re:``, and of classes. An absent field is an empty list.

    Raises:
        ModelError: the field is something else.
    """

    def __init__(self, fields: Fields, field: str) -> None:
        targets = fields.values.get(field) or []
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise fields.error(field, "a list of strings")
        self._names = {decoder_name(target) for target in targets if not target.startswith("re:")}
        self._patterns = [Pattern(target[3:], fields, field) for target in targets if target.startswith("re:")]

    def match(self, name: str) -> int:
        """How closely a linear layer is meant: 3 by name, 2 by a pattern, 1 by its class, 0 not at all.

        Raises:
            ModelError: a pattern takes too long.
        """
        if name in self._names:
            return 3
        if any(pattern.match(name) for pattern in self._patterns):
            return 2
        return int(_CLASS in self._names)
