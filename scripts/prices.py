"""Make gateway/costs/prices.json from LiteLLM's list of models (model_prices_and_context_window.json, MIT).

    python -m scripts.prices LIST.json --source "LiteLLM 1.110.2" --date 2026-11-25

The list names US dollars for a token; the table has them for a million. Models without a price, or with a price of 0,
are left out: an unknown price is not 0.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent.parent / "gateway" / "costs" / "prices.json"
PROVIDERS = {
    "openai": "openai",
    "text-completion-openai": "openai",
    "anthropic": "anthropic",
    "gemini": "gemini",
    "mistral": "mistral",
    "deepseek": "deepseek",
    "xai": "xai",
    "cohere": "cohere",
    "cohere_chat": "cohere",
    "groq": "groq",
    "together_ai": "together_ai",
    "perplexity": "perplexity",
    "cerebras": "cerebras",
    "moonshot": "moonshot",
    "zai": "zai",
    "voyage": "voyage",
}
MODES = {"chat", "completion", "embedding", "responses"}
COSTS = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cached_input": "cache_read_input_token_cost",
    "cache_write": "cache_creation_input_token_cost",
    "cache_write_1h": "cache_creation_input_token_cost_above_1hr",
    "audio_input": "input_cost_per_audio_token",
    "audio_output": "output_cost_per_audio_token",
    "reasoning": "output_cost_per_reasoning_token",
}
_ABOVE = re.compile(r"^input_cost_per_token_above_(\d+)k_tokens$")
# Open weights whose names on an unknown host do not say who computes them, and classes of sizes, which are no models.
_NOT_NAMED = re.compile(r"gemma|^together-ai-|/container$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--source", required=True, help="what the table says of where it is from")
    parser.add_argument("--date", required=True, help="when the list was read, YYYY-MM-DD")
    given = parser.parse_args()
    providers: dict[str, dict[str, Any]] = {name: {} for name in PROVIDERS.values()}
    for provider, model, price in prices(json.loads(given.list.read_text(encoding="utf-8"))):
        providers[provider][model] = price
    TABLE.write_text(rendered(given.source, given.date, providers), encoding="utf-8")
    print(f"{TABLE}: {sum(map(len, providers.values()))} models")


def prices(models: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(provider, model, price) of every model that belongs into the table."""
    for name, fields in sorted(models.items()):
        provider = PROVIDERS.get(fields.get("litellm_provider", ""))
        if provider is None or fields.get("mode") not in MODES or _NOT_NAMED.search(name):
            continue
        price = price_of(fields)
        if price is not None:
            yield provider, name.removeprefix(provider + "/"), price


def price_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The price of a model, with those of long prompts and of service tiers; None where there is none."""
    price = _variant(fields, "")
    if price is None:
        return None
    for tier in ("flex", "priority"):
        if (variant := _variant(fields, "_" + tier)) is not None:
            price[tier] = variant
    return price


def _variant(fields: Mapping[str, Any], tier: str) -> dict[str, Any] | None:
    price = _costs(fields, tier)
    if not price.get("input"):
        return None
    above = sorted(int(match[1]) for name in fields if (match := _ABOVE.match(name)))
    if above:
        longer = _costs(fields, f"_above_{above[0]}k_tokens{tier}")
        if longer.get("input"):
            price |= {"above": above[0] * 1000, "long": longer}
    return price


def _costs(fields: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    """What is 0 is left out, as what is not named: the one costs 0 by default, the other as what it is a part of."""
    found = {name: fields.get(cost + suffix) for name, cost in COSTS.items()}
    price: dict[str, Any] = {name: round(cost * 1e6, 6) for name, cost in found.items() if cost}
    return price


def rendered(source: str, date: str, providers: Mapping[str, Mapping[str, Any]]) -> str:
    """The table, a model on each line."""
    blocks = [
        f"  {json.dumps(provider)}: {{\n"
        + ",\n".join(f"    {json.dumps(model)}: {json.dumps(price)}" for model, price in sorted(models.items()))
        + "\n  }"
        for provider, models in providers.items()
    ]
    head = f'{{\n"source": {json.dumps(source)},\n"date": {json.dumps(date)},\n"providers": {{\n'
    return head + ",\n".join(blocks) + "\n}}\n"


if __name__ == "__main__":
    main()
