"""What can be wrong with quantised weights."""

from __future__ import annotations

from backend.errors import ModelError


class CannotQuantize(ModelError):
    """A weight cannot be kept in a scheme; the message says which size or value is in the way."""
