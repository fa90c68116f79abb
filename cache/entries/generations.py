"""Which entries have been purged, without touching the entries.

A purge gives its scope (everything, one namespace, one model) a new token. An entry has the tokens under which its
request began and is valid only while they are all current, so a purge is one write however many entries it concerns,
and an answer that was being computed during a purge is not kept either.
"""

import secrets
from collections import deque
from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

Scope = Literal["all", "namespace", "model"]
_NEVER_PURGED = "0"
# Of each scope, how many former tokens are recognised.
_FORMER_TOKENS = 64


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
        self._former: dict[str, deque[str]] = {}
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
        if purge.scope == "all" and self._tokens.get("all") != purge.token:
            self._forget_scopes()
        self._replace(purge.field, purge.token)
        self.changes += 1

    def merge(self, tokens: Mapping[str, str]) -> bool:
        """Merges the shared state; True if that changed it.

        A scope that is missing there was purged nevertheless, unless everything was purged since then: its token here
        stays. So does one that has replaced the token there: see `undone_in`.
        """
        before = dict(self._tokens)
        undone = self.undone_in(tokens)
        if "all" in tokens and "all" not in undone and tokens["all"] != self._tokens.get("all"):
            self._forget_scopes()
        for scope, token in tokens.items():
            if scope not in undone:
                self._replace(scope, token)
        news = before != self._tokens
        self.changes += news
        return news

    def undone_in(self, tokens: Mapping[str, str]) -> dict[str, str]:
        """The scopes whose shared token was replaced by a purge that this process knows: that purge was lost."""
        return {scope: token for scope, token in tokens.items() if token in self._former.get(scope, ())}

    def missing_from(self, tokens: Mapping[str, str]) -> dict[str, str]:
        """The scopes known here and not there, with their tokens."""
        return {scope: token for scope, token in self._tokens.items() if scope not in tokens}

    def _replace(self, scope: str, token: str) -> None:
        before = self._tokens.get(scope)
        if before != token:
            former = self._former.setdefault(scope, deque(maxlen=_FORMER_TOKENS))
            if token in former:
                former.remove(token)
            if before is not None:
                former.append(before)
            self._tokens[scope] = token

    def _forget_scopes(self) -> None:
        """No entry of before a purge of everything counts, whatever was purged before that."""
        self._tokens = {scope: token for scope, token in self._tokens.items() if scope == "all"}
        self._former = {scope: former for scope, former in self._former.items() if scope == "all"}


def purge_of(field: str) -> Purge:
    """A new purge of the scope with this field."""
    scope, _, name = field.partition(":")
    return new_purge(cast(Scope, scope), name)


def _field(scope: Scope, name: str) -> str:
    return "all" if scope == "all" else f"{scope}:{name}"
