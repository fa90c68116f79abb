"""What the programs have in common: their arguments, what they ask, and how they tell what came of it.

Argument: {url, key, model, via, only, folder} as JSON; `only` names the checks to run, `folder` is an empty one.
Standard output: one line of JSON, {check: what came of it}.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

ARGUMENTS: dict[str, Any] = json.loads(sys.argv[1])
ROOT: str = ARGUMENTS["url"]
"""The gateway's address without /v1."""
V1 = f"{ROOT}/v1"
KEY: str = ARGUMENTS["key"]
MODEL: str = ARGUMENTS["model"]

CHAT = "Say hello."
STREAM = "Say goodbye."
WEATHER = "What is the weather in Paris?"
CITY = "Which city is it?"
LIMIT = 64
"""The most tokens of an answer, where a client has a name for that."""
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_FUNCTION = {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER_SCHEMA}


class City(BaseModel):
    """What a structured answer must be."""

    model_config = ConfigDict(extra="forbid")
    capital: bool


CITY_SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "boolean"}},
    "required": ["capital"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """What the tool returns."""
    return f"Sunny in {city}."


def messages(text: str) -> list[dict[str, str]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": text}]


def run(*checks: Callable[[], Any]) -> None:
    """Run those of the checks that are wanted, one after the other, and tell what each returned."""
    wanted = [check for check in checks if not ARGUMENTS.get("only") or check.__name__ in ARGUMENTS["only"]]
    told = {}
    for check in wanted:
        came = check()
        told[check.__name__] = asyncio.run(came) if inspect.iscoroutine(came) else came
    print(json.dumps(told))
