"""The number of hypothesis examples that the interpreter has time for."""

from __future__ import annotations

from hypothesis import Phase, settings

FEW = settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
"""A program takes tens of milliseconds to interpret, so looking for a smaller failure would take minutes."""
