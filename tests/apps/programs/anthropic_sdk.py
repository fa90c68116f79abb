# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""The Python client `anthropic`."""

from anthropic import Anthropic
from program import CHAT, CITY, KEY, LIMIT, MODEL, ROOT, STREAM, WEATHER, WEATHER_FUNCTION, City, messages, run, weather

client = Anthropic(base_url=ROOT, api_key=KEY)


def chat():
    return client.messages.create(model=MODEL, messages=messages(CHAT), max_tokens=LIMIT).content[0].text


def stream():
    with client.messages.stream(model=MODEL, messages=messages(STREAM), max_tokens=LIMIT) as events:
        text = "".join(events.text_stream)
        assert events.get_final_text() == text
    return text


def tools():
    name, description, schema = WEATHER_FUNCTION.values()
    offered = [{"name": name, "description": description, "input_schema": schema}]
    said = messages(WEATHER)
    asked = {"model": MODEL, "max_tokens": LIMIT, "tools": offered}
    first = client.messages.create(messages=said, tool_choice={"type": "any"}, **asked)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return client.messages.create(messages=said, **asked).content[0].text


def structured():
    parsed = client.messages.parse(model=MODEL, messages=messages(CITY), max_tokens=LIMIT, output_format=City)
    return parsed.parsed_output.model_dump()


def count_tokens():
    return client.messages.count_tokens(model=MODEL, messages=messages(CHAT)).input_tokens


def models():
    return [model.id for model in client.models.list()]


run(chat, stream, tools, structured, count_tokens, models)
