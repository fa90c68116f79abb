"""The models of the settings: what a client's name of a model stands for."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from yarl import URL

from gateway.settings.fields import SettingsConflict
from gateway.settings.upstreams import ModelSettings, RoutingSettings, RuleSettings, UpstreamSettings

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_NO_SETTINGS = ModelSettings()


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What rules may ask of a request. `headers` find a name in any case."""

    prompt_chars: int = 0
    tools: bool = False
    team: str | None = None
    key: str | None = None
    """The name of the caller's key."""
    headers: Mapping[str, str] = field(default_factory=lambda: _NO_HEADERS)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The model that answers a request."""

    model: str
    variant: str | None = None
    """The variant of the model that the client named, if it is one."""
    fallbacks: tuple[str, ...] = ()
    """Models that answer when no upstream of it does, in this order."""


class ModelTable:
    """Aliases, variants, fallbacks and upstreams of models. Immutable."""

    def __init__(self, routing: RoutingSettings, servers: Sequence[UpstreamSettings]) -> None:
        """Raises SettingsConflict for names that do not go together."""
        self._settings = routing
        self._aliases = {name: _target(name, routing.aliases) for name in routing.aliases}
        if servers:
            _check_upstreams(routing, {upstream_name(server) for server in servers})
        for name, model in routing.models.items():
            self._check(name, model)

    @property
    def names(self) -> frozenset[str]:
        """Every name that clients may use and that the settings mention: aliases, models, and variants of models."""
        models = self._settings.models
        variants = {f"{name}:{variant}" for name, model in models.items() for variant in model.variants}
        return frozenset({*self._aliases, *models, *variants})

    def settings(self, model: str) -> ModelSettings:
        """What the settings say of a model; the defaults for one that they do not mention."""
        return self._settings.models.get(model, _NO_SETTINGS)

    def upstreams(self, model: str | None) -> tuple[str, ...]:
        """The names of the upstreams that a model is restricted to; () for all."""
        return self.settings(model).upstreams if model is not None else ()

    def resolve(self, model: str, facts: RequestFacts) -> Resolved:
        """What answers for a model under the name that a client uses. A name that is not known stands for itself.

        The variant is the one that the client names as MODEL:VARIANT, or that of the first rule that holds.
        """
        name, variant = self._named(model)
        settings = self.settings(name)
        if variant is None:
            variant = next((rule.use for rule in settings.rules if _holds(rule, facts)), None)
        if variant is None:
            return Resolved(name, None, self._fallbacks(name))
        chosen = self._unaliased(settings.variants[variant])
        return Resolved(chosen, variant, self._fallbacks(chosen) or self._fallbacks(name))

    def unlisted(self, listed: Collection[str]) -> list[str]:
        """The models of the settings that are not among those that upstreams list."""
        targets = {*self._aliases.values()}
        for model in self._settings.models.values():
            targets.update(map(self._unaliased, (*model.variants.values(), *model.fallbacks)))
        return sorted(targets - set(listed) - set(self._settings.models))

    def unaliased(self, name: str) -> str:
        """The model that a client's name stands for, without its variant."""
        return self._named(name)[0]

    def has_rules(self, model: str) -> bool:
        """Whether rules choose a variant of the model."""
        return bool(self.settings(model).rules)

    def _named(self, model: str) -> tuple[str, str | None]:
        """The model and the variant that a client's name says."""
        if model in self._aliases or model in self._settings.models:
            return self._unaliased(model), None
        base, colon, variant = model.rpartition(":")
        base = self._unaliased(base)
        return (base, variant) if colon and variant in self.settings(base).variants else (model, None)

    def _unaliased(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _fallbacks(self, name: str) -> tuple[str, ...]:
        return tuple(map(self._unaliased, self.settings(name).fallbacks))

    def _check(self, name: str, model: ModelSettings) -> None:
        key = ("routing", "models", name)
        if name in self._aliases:
            raise SettingsConflict(key, f": {name!r} is an alias of {self._aliases[name]!r} as well; one of both")
        for number, rule in enumerate(model.rules):
            if rule.use not in model.variants:
                known = _listed(model.variants)
                raise SettingsConflict(
                    (*key, "rules", str(number), "use"), f": {rule.use!r} is no variant of it; {known}"
                )
        for number, fallback in enumerate(model.fallbacks):
            if self._unaliased(fallback) == name:
                raise SettingsConflict(
                    (*key, "fallbacks", str(number)), f": {fallback!r} is the model itself; name another one"
                )
        if sum(model.canary.values()) > 1 + 1e-9:
            given = sum(model.canary.values())
            raise SettingsConflict((*key, "canary"), f": expected shares of 1 together at most, got {given:g}")


def check_models(routing: RoutingSettings, servers: Sequence[UpstreamSettings]) -> None:
    """Raises SettingsConflict for names that do not go together."""
    ModelTable(routing, servers)


def upstream_name(server: UpstreamSettings) -> str:
    """What other settings call an upstream: its name, or the host and port of its URL."""
    url = URL(server.url)
    return server.name or f"{url.host}:{url.port}"


def _target(alias: str, aliases: Mapping[str, str]) -> str:
    """What an alias stands for, over further aliases. Raises SettingsConflict for a circle."""
    passed = [alias]
    while (name := aliases.get(passed[-1])) is not None:
        if name in passed:
            circle = " → ".join([*passed, name])
            raise SettingsConflict(("routing", "aliases", alias), f": {circle} is a circle; name a model")
        passed.append(name)
    return passed[-1]


def _check_upstreams(routing: RoutingSettings, known: Collection[str]) -> None:
    for name, model in routing.models.items():
        for key, upstream in _upstream_keys(model):
            path = ("routing", "models", name, *key)
            if upstream not in known:
                raise SettingsConflict(path, f": {upstream!r} is no upstream; {_listed(known)}")
            if key[0] == "canary" and model.upstreams and upstream not in model.upstreams:
                raise SettingsConflict(path, ": is not among the upstreams of the model")


def _upstream_keys(model: ModelSettings) -> Iterator[tuple[tuple[str, str], str]]:
    yield from ((("upstreams", str(number)), name) for number, name in enumerate(model.upstreams))
    yield from ((("canary", name), name) for name in model.canary)


def _listed(names: Collection[str]) -> str:
    return f"there are {', '.join(sorted(names))}" if names else "there is none"


def _holds(rule: RuleSettings, facts: RequestFacts) -> bool:
    if rule.max_prompt_chars is not None and facts.prompt_chars > rule.max_prompt_chars:
        return False
    if rule.min_prompt_chars is not None and facts.prompt_chars < rule.min_prompt_chars:
        return False
    if rule.tools is not None and facts.tools != rule.tools:
        return False
    if (rule.teams and facts.team not in rule.teams) or (rule.keys and facts.key not in rule.keys):
        return False
    if rule.header is None:
        return True
    name, _, value = rule.header.partition(":")
    return facts.headers.get(name, "").strip() == value.strip()
