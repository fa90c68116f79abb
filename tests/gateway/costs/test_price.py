"""How the price of a model is found."""

import pytest

from gateway.costs.price import Price, PriceList, PriceTable, published_prices
from gateway.costs.usage import TokenUsage
from gateway.settings.operations import PriceSettings

OPENAI, GROQ, OWN = "https://api.openai.com/v1", "https://api.groq.com/openai/v1", "http://gpu-1:8000/v1"
LIST = PriceList(
    source="a test",
    date="2026-11-25",
    providers={
        "openai": {"gpt-4o": Price(input=1), "gpt-4o-2024-05-13": Price(input=2), "ft:gpt-4o": Price(input=3)},
        "anthropic": {"claude-sonnet": Price(input=4)},
        "gemini": {"gemini-pro": Price(input=5)},
        "groq": {"openai/gpt-oss-120b": Price(input=6)},
        "deepseek": {"deepseek-chat": Price(input=7)},
        "together_ai": {"meta-llama/Llama-3": Price(input=8)},
    },
)


@pytest.mark.parametrize(
    ("url", "model", "price", "provider"),
    [
        (OPENAI, "gpt-4o", 1, "openai"),
        (OPENAI, "GPT-4o", 1, "openai"),
        (OPENAI, "openai/gpt-4o", 1, "openai"),
        (OPENAI, "gpt-4o-2024-05-13", 2, "openai"),
        (OPENAI, "gpt-4o-2030-01-31", 1, "openai"),
        (OPENAI, "ft:gpt-4o:org::id", 3, "openai"),
        ("https://team.openai.azure.com/openai/v1", "gpt-4o", 1, "openai"),
        (OPENAI, "claude-sonnet", None, "openai"),
        (OPENAI, "gpt-4", None, "openai"),
        ("https://api.anthropic.com", "claude-sonnet-20250929", 4, "anthropic"),
        ("https://generativelanguage.googleapis.com/v1beta/openai", "models/gemini-pro", 5, "gemini"),
        (GROQ, "openai/gpt-oss-120b", 6, "groq"),
        (GROQ, "gpt-4o", None, "groq"),
        ("https://api.together.xyz/v1", "meta-llama/Llama-3", 8, "together_ai"),
        (OWN, "gpt-4o", 1, "openai"),
        (OWN, "google/gemini-pro", 5, "gemini"),
        (OWN, "claude-sonnet@20250929", 4, "anthropic"),
        (OWN, "deepseek/deepseek-chat", 7, "deepseek"),
        (OWN, "deepseek-chat", None, ""),
        (OWN, "meta-llama/Llama-3", None, ""),
        (OWN, "gpt-4o-mini", None, ""),
        ("http://api.openai.com.evil.example/v1", "deepseek-chat", None, ""),
        (OWN, "", None, ""),
    ],
)
def test_a_model_is_found_by_host_and_name(url: str, model: str, price: float | None, provider: str) -> None:
    """The host says who bills; elsewhere a prefix does, or the name of a model that only one provider has."""
    found, by = PriceTable(LIST, {}).find("main", url, model)
    assert (found and found.input, by) == (price, provider)


def test_settings_come_first() -> None:
    """A price of the settings replaces the table's; one with the upstream's name is for that upstream."""
    own = {"gpt-4o": PriceSettings(input=10, output=20), "azure/prod": PriceSettings(input=11, output=21)}
    table = PriceTable(LIST, own | {"azure/gpt-4o": PriceSettings(input=12, output=22, cached_input=0)})
    assert table.find("main", OPENAI, "gpt-4o") == (Price(input=10, output=20), "openai")
    assert table.find("azure", OPENAI, "gpt-4o") == (Price(input=12, output=22, cached_input=0), "openai")
    assert table.find("azure", OWN, "prod") == (Price(input=11, output=21), "")
    assert table.find("main", OWN, "prod") == (None, "")


def test_the_service_tier_and_the_length_decide() -> None:
    """A tier without a price is unknown; beyond the threshold the long price holds for the whole request."""
    price = Price(input=2, above=100, long=Price(input=4), flex=Price(input=1, above=100, long=Price(input=3)))
    found = [
        price.at(TokenUsage(prompt, tier=tier))
        for tier in ("", "default", "flex", "priority", "batch")
        for prompt in (100, 101)
    ]
    assert [at and at.input for at in found] == [2, 4, 2, 4, 1, 3, None, None, None, None]


def test_the_published_table_is_whole() -> None:
    """It says its source and date, has a price above 0 for each model, and none of what everyone may compute."""
    table = published_prices()
    assert table.source
    assert table.date
    listed = [(provider, name, price) for provider, models in table.providers.items() for name, price in models.items()]
    assert 300 < len(listed) < 1000
    assert [entry for entry in listed if not 0 < entry[2].input < 1000 or not 0 <= entry[2].output < 10_000] == []
    assert [entry for entry in listed if (entry[2].above > 0) != (entry[2].long is not None)] == []
    assert [name for name in table.providers["openai"] if "oss" in name] == []
    assert table.providers["openai"]["gpt-4o"] == Price(
        input=2.5, output=10, cached_input=1.25, priority=Price(input=4.25, output=17, cached_input=2.125)
    )
    assert table.providers["anthropic"]["claude-sonnet-4-5"].cache_write_1h == 6
