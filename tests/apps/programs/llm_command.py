# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""The command `llm`, which has its models in a file."""

import json

from command import FOLDER, command
from program import CHAT, CITY, KEY, MODEL, STREAM, V1, WEATHER, run

FUNCTION = """
def get_weather(city: str) -> str:
    "The weather of a city."
    return f"Sunny in {city}."
"""
entry = {"model_id": "gate", "model_name": MODEL, "api_base": V1, "supports_tools": True, "supports_schema": True}
(FOLDER / "extra-openai-models.yaml").write_text(json.dumps([entry]))


def llm(*words):
    return command("llm", "--key", KEY, "-m", "gate", *words, LLM_USER_PATH=str(FOLDER)).strip()


def chat():
    return llm("--no-stream", CHAT)


def stream():
    return llm(STREAM)


def tools():
    return llm("--functions", FUNCTION, WEATHER)


def structured():
    return llm("--schema", "capital bool", CITY)


run(chat, stream, tools, structured)
