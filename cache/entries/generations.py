"""Which entries have been purged, without touching the entries.

A purge gives its scope (everything, one namespace, one model, one tag) a new token. An entry has the tokens under which
its request began and is valid only while they are all current, so a purge is one write however many entries it
concerns, and an answer that was being computed during a purge is not kept either. A purge by age or of a layer is a
time before which no answer counts; of two such times the later one holds.
"""

import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, cast

from cache.entries.entry import Tag

Scope = Literal["all", "namespace", "model", "tags", "tag", "layer", "before"]
_NEVER_PURGED = "0"
# Of each scope, how many former tokens are recognised.
_FORMER_TOKENS = 64
_BEFORE = "before"
_LATEST = 1e11
"""No Unix time in seconds: what another writer puts there must not end the cache for ever."""


class Purge(NamedTuple):
    """Everything or everything with a tag (`name` is empty), one namespace, model or tag; `token` is the scope's new
    generation. The token of "before" and of a layer is a time, Unix seconds: answers from before then are purged.
    """

    scope: Scope
    name: str
    token: str

    @property
    def field(self) -> str:
        return _field(self.scope, self.name)

    def covers(self, namespace: str, model: str, created: float) -> bool:
        """Whether an answer from before this purge is purged by it; False where only its tags would tell.

        `created` is when the answer was computed, Unix seconds.
        """
        match self.scope:
            case "model":
                return model == self.name
            case "namespace":
                return namespace == self.name
            case "before" | "layer":
                return created < float(self.token)
            case "tags" | "tag":
                return False
            case "all":
                return True


def new_purge(scope: Scope, name: str = "") -> Purge:
    # Random, not counted: after a flushed Redis a counter would repeat values that old entries have.
    return Purge(scope, name, secrets.token_hex(6))


def purge_before(time: float, layer: str = "") -> Purge:
    """A purge of answers that were computed before `time`, Unix seconds; of one layer, or everywhere."""
    return Purge("layer" if layer else "before", layer, repr(float(time)))


class Generations:
    """This process's view of the purges so far."""

    def __init__(self) -> None:
        self._tokens: dict[str, str] = {}
        self._former: dict[str, deque[str]] = {}
        self._times: dict[str, float] = {}
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

    def tagged(self, names: Iterable[str]) -> tuple[Tag, ...]:
        """These tags for an entry of a request that begins now."""
        return tuple(Tag(name, self._generation_of(name)) for name in names)

    def _generation_of(self, tag: str) -> str:
        tokens = self._tokens
        return f"{tokens.get('tags', _NEVER_PURGED)}.{tokens.get(_field('tag', tag), _NEVER_PURGED)}"

    def are_current(self, tags: Sequence[Tag]) -> bool:
        """Whether none of these has been purged since its request began."""
        return all(self._generation_of(name) == generation for name, generation in tags)

    @property
    def purged_tags(self) -> int:
        """How many tags have a token."""
        return sum(map(is_of_tag, self._tokens))

    def purged_before(self, layer: str) -> float:
        """The time of the last purge of a layer, Unix seconds; without one, of the last purge by age."""
        return self._times.get(_field("layer", layer) if layer else _BEFORE, 0.0)

    def apply(self, purge: Purge) -> None:
        if self._tokens.get(purge.field) != purge.token:
            self._forget_within(purge.scope)
        if _is_time(purge.field):
            self._raise_time(purge.field, purge.token)
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
        for wide in ("all", "tags"):
            if wide in tokens and wide not in undone and tokens[wide] != self._tokens.get(wide):
                self._forget_within(wide)
        for scope, token in tokens.items():
            if _is_time(scope):
                self._raise_time(scope, token)
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
        return {scope: token for scope, token in self._tokens.items() if scope not in tokens and not _is_time(scope)}

    def later_than(self, tokens: Mapping[str, str]) -> list[Purge]:
        """The purges by time that are known here, of which there are earlier ones or none there."""
        return [
            purge_before(time, field.partition(":")[2])
            for field, time in self._times.items()
            if time > _time_of(tokens.get(field, "0"))
        ]

    def _raise_time(self, field: str, token: str) -> None:
        if (time := _time_of(token)) > self._times.get(field, 0.0):
            self._times[field] = time
            self._tokens[field] = token
            self.before = self._times.get(_BEFORE, 0.0)

    def _replace(self, scope: str, token: str) -> None:
        before = self._tokens.get(scope)
        if before != token:
            former = self._former.get(scope)
            if former is not None and token in former:
                former.remove(token)
            if before is not None:
                self._former.setdefault(scope, deque(maxlen=_FORMER_TOKENS)).append(before)
            self._tokens[scope] = token

    def _forget_within(self, scope: str) -> None:
        """No entry of before a purge of everything, or of all tags, counts, whatever was purged before that."""
        if scope == "all":
            self._tokens = {field: token for field, token in self._tokens.items() if field == "all" or _is_time(field)}
            self._former = {field: former for field, former in self._former.items() if field == "all"}
        elif scope == "tags":
            self._tokens = {field: token for field, token in self._tokens.items() if not is_of_tag(field)}
            self._former = {field: former for field, former in self._former.items() if not is_of_tag(field)}


def purge_of(field: str) -> Purge:
    """A new purge of the scope with this field."""
    scope, _, name = field.partition(":")
    return new_purge(cast(Scope, scope), name)


def is_of_tag(field: str) -> bool:
    """Whether this is the field of a purge of one tag."""
    return field.startswith("tag:")


def _is_time(field: str) -> bool:
    return field == _BEFORE or field.startswith("layer:")


def _time_of(token: str) -> float:
    """0 for what is no time, which another writer may have put there."""
    try:
        time = float(token)
    except ValueError:
        return 0.0
    return time if time < _LATEST else 0.0


def _field(scope: Scope, name: str) -> str:
    return scope if scope in ("all", "tags", "before") else f"{scope}:{name}"
