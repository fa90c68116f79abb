# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""The Python client `openai`: the Responses API."""

import json

from openai import OpenAI
from program import CHAT, CITY, KEY, LIMIT, MODEL, STREAM, V1, WEATHER, WEATHER_FUNCTION, City, run, weather

client = OpenAI(base_url=V1, api_key=KEY)
create = client.responses.create


def chat():
    return create(model=MODEL, input=CHAT, max_output_tokens=LIMIT).output_text


def stream():
    events = list(create(model=MODEL, input=STREAM, max_output_tokens=LIMIT, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text
    return text


def tools():
    offered = [{"type": "function", **WEATHER_FUNCTION, "strict": True}]
    said = [{"role": "user", "content": WEATHER}]
    first = create(model=MODEL, input=said, tools=offered, tool_choice="required", max_output_tokens=LIMIT)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = weather(**json.loads(call.arguments))
    said += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    return create(model=MODEL, input=said, tools=offered, max_output_tokens=LIMIT).output_text


def structured():
    parsed = client.responses.parse(model=MODEL, input=CITY, text_format=City, max_output_tokens=LIMIT)
    return parsed.output_parsed.model_dump()


def conversation():
    first = create(model=MODEL, input=CHAT, max_output_tokens=LIMIT)
    return create(model=MODEL, input=STREAM, previous_response_id=first.id, max_output_tokens=LIMIT).output_text


run(chat, stream, tools, structured, conversation)
