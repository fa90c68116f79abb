# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""The Python client `openai`: chats, embeddings and models."""

import json

from openai import OpenAI
from program import CHAT, CITY, KEY, LIMIT, MODEL, STREAM, V1, WEATHER, WEATHER_FUNCTION, City, messages, run, weather

client = OpenAI(base_url=V1, api_key=KEY)
create = client.chat.completions.create


def chat():
    return create(model=MODEL, messages=messages(CHAT), max_tokens=LIMIT).choices[0].message.content


def stream():
    chunks = create(model=MODEL, messages=messages(STREAM), max_tokens=LIMIT, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools():
    offered = [{"type": "function", "function": WEATHER_FUNCTION}]
    said = messages(WEATHER)
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    first = create(model=MODEL, messages=said, tools=offered, max_tokens=LIMIT, **forced)
    (call,) = first.choices[0].message.tool_calls
    result = weather(**json.loads(call.function.arguments))
    said += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    return create(model=MODEL, messages=said, tools=offered, max_tokens=LIMIT).choices[0].message.content


def structured():
    parsed = client.chat.completions.parse(model=MODEL, messages=messages(CITY), response_format=City, max_tokens=LIMIT)
    return parsed.choices[0].message.parsed.model_dump()


def embeddings():
    return len(client.embeddings.create(model=MODEL, input=["one", "two"]).data)


def models():
    return [model.id for model in client.models.list()]


run(chat, stream, tools, structured, embeddings, models)
