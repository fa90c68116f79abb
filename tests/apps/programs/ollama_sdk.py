# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""The Python client `ollama`."""

from ollama import Client
from program import (
    CHAT,
    CITY,
    CITY_SCHEMA,
    KEY,
    LIMIT,
    MODEL,
    ROOT,
    STREAM,
    WEATHER,
    WEATHER_FUNCTION,
    City,
    messages,
    run,
    weather,
)  # fmt: skip

client = Client(host=ROOT, headers={"Authorization": f"Bearer {KEY}"})
options = {"num_predict": LIMIT}


def chat():
    return client.chat(model=MODEL, messages=messages(CHAT), options=options).message.content


def stream():
    parts = client.chat(model=MODEL, messages=messages(STREAM), options=options, stream=True)
    return "".join(part.message.content or "" for part in parts)


def tools():
    offered = [{"type": "function", "function": WEATHER_FUNCTION}]
    said = messages(WEATHER)
    first = client.chat(model=MODEL, messages=said, tools=offered, options=options).message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_name": call.function.name, "content": weather(**call.function.arguments)}
    return client.chat(model=MODEL, messages=[*said, first, result], tools=offered, options=options).message.content


def structured():
    answer = client.chat(model=MODEL, messages=messages(CITY), format=CITY_SCHEMA, options=options)
    return City.model_validate_json(answer.message.content).model_dump()


def generate():
    return client.generate(model=MODEL, prompt="Once upon a time", options=options).response


def generate_stream():
    return "".join(part.response for part in client.generate(model=MODEL, prompt="Then", options=options, stream=True))


def embeddings():
    return len(client.embed(model=MODEL, input=["one", "two"]).embeddings)


def models():
    assert client.show(MODEL).capabilities
    return [model.model for model in client.list().models]


run(chat, stream, tools, structured, generate, generate_stream, embeddings, models)
