"""Which entries have been purged, without touching the entries.

A purge gives its scope (everything, one namespace, one model) a new token. An entry has the tokens under which its
request began and is valid only while they are all current, so a purge is one write however many entries it concerns,
and an answer that was being computed during a purge is not kept either. A purge by age is a time before which no answer
counts; of two such times the later one holds.
"""

import secrets
from collections import deque
from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

Scope = Literal["all", "namespace", "model", "before"]
_NEVER_PURGED = "0"
# Of each scope, how many former tokens are recognised.
_FORMER_TOKENS = 64
_BEFORE = "before"
_LATEST = 1e11
"""No Unix time in seconds: what another writer puts there must not end the cache for ever."""


class Purge(NamedTuple):
    """Everything (`name` is empty), one namespace, or one model; `token` is the scope's new generation. The token of
    "before" is a time, Unix seconds: answers from before then are purged.
    """

    scope: Scope
    name: str
    token: str

    @property
    def field(self) -> str:
        return _field(self.scope, self.name)


def new_purge(scope: Scope, name: str = "") -> Purge:
    # Random, not counted: after a flushed Redis a counter would repeat values that old entries have.
    return Purge(scope, name, secrets.token_hex(6))


def purge_before(time: float) -> Purge:
    """A purge of answers that were computed before `time`, Unix seconds."""
    return Purge("before", "", repr(float(time)))


class Generations:
    """This process's view of the purges so far."""

    def __init__(self) -> None:
        self._tokens: dict[str, str] = {}
        self._former: dict[str, deque[str]] = {}
        self.changes = 0
        self.before = 0.0
        """Unix time before which no answer counts."""

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
        if purge.scope == "before":
            self._raise_before(purge.token)
        else:
            self._replace(purge.field, purge.token)
        self.changes += 1

    def merge(self, tokens: Mapping[str, str]) -> bool:
        """Merges the shared state; True if that changed it.

        A scope that is missing there was purged nevertheless, unless everything was purged since then: its token here
        stays. So does one that has replaced the token there: see `undone_in`.
        """
        known = dict(self._tokens)
        undone = self.undone_in(tokens)
        if "all" in tokens and "all" not in undone and tokens["all"] != self._tokens.get("all"):
            self._forget_scopes()
        for scope, token in tokens.items():
            if scope == _BEFORE:
                self._raise_before(token)
            elif scope not in undone:
                self._replace(scope, token)
        news = known != self._tokens
        self.changes += news
        return news

    def undone_in(self, tokens: Mapping[str, str]) -> dict[str, str]:
        """The scopes whose shared token was replaced by a purge that this process knows: that purge was lost."""
        return {scope: token for scope, token in tokens.items() if token in self._former.get(scope, ())}

    def missing_from(self, tokens: Mapping[str, str]) -> dict[str, str]:
        """The scopes known here and not there, with their tokens."""
        return {scope: token for scope, token in self._tokens.items() if scope not in tokens and scope != _BEFORE}

    def later_than(self, tokens: Mapping[str, str]) -> Purge | None:
        """The purge by age that is known here, if there is an earlier one or none there."""
        return purge_before(self.before) if self.before > _time_of(tokens.get(_BEFORE, "0")) else None

    def _raise_before(self, token: str) -> None:
        if (time := _time_of(token)) > self.before:
            self.before = time
            self._tokens[_BEFORE] = token

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
        self._tokens = {scope: token for scope, token in self._tokens.items() if scope in ("all", _BEFORE)}
        self._former = {scope: former for scope, former in self._former.items() if scope == "all"}


def purge_of(field: str) -> Purge:
    """A new purge of the scope with this field."""
    scope, _, name = field.partition(":")
    return new_purge(cast(Scope, scope), name)


def _time_of(token: str) -> float:
    """0 for what is no time, which another writer may have put there."""
    try:
        time = float(token)
    except ValueError:
        return 0.0
    return time if time < _LATEST else 0.0


def _field(scope: Scope, name: str) -> str:
    return scope if scope in ("all", "before") else f"{scope}:{name}"
