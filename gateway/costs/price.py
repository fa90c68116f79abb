"""The table of prices: prices.json, and what the settings add to it or replace."""

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from urllib.parse import urlsplit

import msgspec

from gateway.costs.usage import TokenUsage
from gateway.settings.operations import PriceSettings

_STANDARD = {"", "default", "standard", "auto", "on_demand"}
_HOSTS = {
    "api.openai.com": "openai",
    "openai.azure.com": "openai",
    "api.anthropic.com": "anthropic",
    "generativelanguage.googleapis.com": "gemini",
    "api.mistral.ai": "mistral",
    "api.deepseek.com": "deepseek",
    "api.x.ai": "xai",
    "api.cohere.com": "cohere",
    "api.cohere.ai": "cohere",
    "api.groq.com": "groq",
    "api.together.xyz": "together_ai",
    "api.together.ai": "together_ai",
    "api.perplexity.ai": "perplexity",
    "api.cerebras.ai": "cerebras",
    "api.moonshot.ai": "moonshot",
    "api.z.ai": "zai",
    "api.voyageai.com": "voyage",
}
"""Providers by the host of an upstream, or the end of it."""
_PREFIXES = {"google": "gemini", "x-ai": "xai", "together": "together_ai", "azure": "openai"}
"""Other names of providers before a slash; their own names are prefixes as well."""
_CLOSED = ("openai", "anthropic", "gemini", "xai")
"""Providers whose models nobody else computes: on an unknown host their names alone say what is billed."""
_SNAPSHOT = re.compile(r"(?:[-@]\d{8}|-\d{4}-\d{2}-\d{2})$")


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """US dollars for a million tokens. A part of the prompt without a price of its own costs as `input`, a part of the
    completion as `output`.

    `long` holds for the whole request if its prompt has more than `above` tokens; `flex` and `priority` for answers of
    these service tiers.
    """

    input: float
    output: float = 0.0
    cached_input: float | None = None
    cache_write: float | None = None
    cache_write_1h: float | None = None
    audio_input: float | None = None
    audio_output: float | None = None
    reasoning: float | None = None
    above: int = 0
    long: "Price | None" = None
    flex: "Price | None" = None
    priority: "Price | None" = None

    def at(self, usage: TokenUsage) -> "Price | None":
        """The price of a request with this usage; None if that of its service tier is not known."""
        tiers = {"flex": self.flex, "priority": self.priority}
        price = self if usage.tier in _STANDARD else tiers.get(usage.tier)
        return price.long if price is not None and price.long is not None and usage.prompt > price.above else price


class PriceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of prices.json: prices by provider and model, with their source and date."""

    source: str
    date: str
    providers: dict[str, dict[str, Price]]


@functools.cache
def published_prices() -> PriceList:
    """The list that comes with Keepgate; read once."""
    text = (resources.files("gateway.costs") / "prices.json").read_bytes()
    return msgspec.json.decode(text, type=PriceList)


class PriceTable:
    """Finds the price of a model at an upstream."""

    def __init__(self, published: PriceList, own: Mapping[str, PriceSettings]) -> None:
        """`own` are the prices of the settings, by MODEL or UPSTREAM/MODEL."""
        self._published = {
            provider: {name.casefold(): price for name, price in prices.items()}
            for provider, prices in published.providers.items()
        }
        self._own = {
            name: Price(
                input=price.input,
                output=price.output,
                cached_input=price.cached_input,
                cache_write=price.cache_write,
            )
            for name, price in own.items()
        }

    def find(self, upstream: str, url: str, model: str) -> tuple[Price | None, str]:
        """(price, provider) of a model under its name at the upstream; None for what is not known, and "".

        The settings come first. Then the provider that the host belongs to, or the prefix of the model's name.
        """
        provider, rest = self._provider(url, model)
        if (own := self.own(upstream, model)) is not None:
            return own, provider
        if provider:
            return self._of(provider, model) or self._of(provider, rest), provider
        for closed in _CLOSED:
            if (price := self._of(closed, model)) is not None:
                return price, closed
        return None, ""

    def own(self, upstream: str, model: str) -> Price | None:
        """The price that the settings give the model, at this upstream or at any."""
        return self._own.get(f"{upstream}/{model}") or self._own.get(model)

    def _provider(self, url: str, model: str) -> tuple[str, str]:
        """The provider, "" if it is not known, and the model's name without its prefix."""
        host = urlsplit(url).hostname or ""
        prefix, _, rest = model.partition("/")
        named = _PREFIXES.get(prefix.casefold(), prefix.casefold())
        is_prefix = bool(rest) and named in self._published
        for end, provider in _HOSTS.items():
            if host == end or host.endswith("." + end):
                return provider, rest if is_prefix and named == provider else model
        return (named, rest) if is_prefix else ("", model)

    def _of(self, provider: str, model: str) -> Price | None:
        prices = self._published.get(provider, {})
        return next((prices[name] for name in _names(model.casefold()) if name in prices), None)


def _names(model: str) -> Iterator[str]:
    """The names under which a model may be listed: its own, without a path, as a base of fine-tuning, undated."""
    model = model.removeprefix("models/")
    yield model
    if model.startswith("ft:"):
        model = ":".join(model.split(":")[:2])
        yield model
    yield _SNAPSHOT.sub("", model)
