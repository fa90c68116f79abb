"""Which entries have been purged, without touching the entries.

A purge gives its scope (everything, one namespace, one model) a new token. An entry has the tokens under which its
request began and is valid only while they are all current, so a purge is one write however many entries it concerns,
and an answer that was being computed during a purge is not kept either.
"""

import secrets
from collections.abc import Mapping
from typing import Literal, NamedTuple

Scope = Literal["all", "namespace", "model"]
_NEVER_PURGED = "0"


class Purge(NamedTuple):
    """Everything (`name` is empty), one namespace, or one model; `token` is the scope's new generation."""

    scope: Scope
    name: str
    token: str

    @property
    def field(self) -> str:
        return _field(self.scope, self.name)


def new_purge(scope: Scope, name: str = "") -> Purge:
    # Random, not counted: after a flushed Redis a counter would repeat values that old entries have.
    return Purge(scope, name, secrets.token_hex(6))


class Generations:
    """This process's view of the purges so far."""

    def __init__(self) -> None:
        self._tokens: dict[str, str] = {}
        self.changes = 0

    def current(self, namespace: str, model: str) -> str:
        """The generation of valid entries of this namespace and model."""
        tokens = self._tokens
        if not tokens:
            return "0.0.0"
        return ".".join(
            (
                tokens.get("all", _NEVER_PURGED),
                tokens.get(_field("namespace", namespace), _NEVER_PURGED),
                tokens.get(_field("model", model), _NEVER_PURGED),
            )
        )

    def apply(self, purge: Purge) -> None:
        self._tokens[purge.field] = purge.token
        self.changes += 1

    def merge(self, tokens: Mapping[str, str]) -> bool:
        """Merges the shared state; True if that changed it.

        A scope that is missing there was purged nevertheless: its token here stays.
        """
        merged = {**self._tokens, **tokens}
        news = merged != self._tokens
        self._tokens = merged
        self.changes += news
        return news

    def missing_from(self, tokens: Mapping[str, str]) -> dict[str, str]:
        """The scopes known here and not there, with their tokens."""
        return {scope: token for scope, token in self._tokens.items() if scope not in tokens}


def _field(scope: Scope, name: str) -> str:
    return "all" if scope == "all" else f"{scope}:{name}"
