# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""smolagents."""

from program import CHAT, KEY, LIMIT, MODEL, STREAM, V1, WEATHER, messages, run, weather
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage

model = OpenAIModel(model_id=MODEL, api_base=V1, api_key=KEY, max_tokens=LIMIT)


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return weather(city)


def said(text):
    return [ChatMessage.from_dict(message) for message in messages(text)]


def chat():
    return model.generate(said(CHAT)).content


def stream():
    return "".join(part.content or "" for part in model.generate_stream(said(STREAM)))


def tools():
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=3, verbosity_level=0)
    return agent.run(WEATHER)


run(chat, stream, tools)
