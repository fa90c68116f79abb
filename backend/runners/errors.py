"""Why a runner does not serve."""

from __future__ import annotations

from backend.errors import BackendError


class RunnerUnavailable(BackendError):
    """The runner cannot serve this model on this machine; the message says why. Another runner may."""
