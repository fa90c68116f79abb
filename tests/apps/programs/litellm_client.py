# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""LiteLLM as a client, by the provider that `via` of the arguments names: openai, anthropic or ollama_chat."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from program import (
    ARGUMENTS,
    CHAT,
    CITY,
    KEY,
    LIMIT,
    MODEL,
    ROOT,
    STREAM,
    V1,
    WEATHER,
    WEATHER_FUNCTION,
    City,
    messages,
    run,
    weather,
)

via = ARGUMENTS["via"]
asked = {
    "model": f"{via}/{MODEL}",
    "api_base": V1 if via == "openai" else ROOT,
    "api_key": KEY,
    "max_tokens": LIMIT,
}


def chat():
    return litellm.completion(messages=messages(CHAT), **asked).choices[0].message.content


def stream():
    chunks = litellm.completion(messages=messages(STREAM), stream=True, **asked)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools():
    offered = [{"type": "function", "function": WEATHER_FUNCTION}]
    said = messages(WEATHER)
    said.append(litellm.completion(messages=said, tools=offered, **asked).choices[0].message.model_dump())
    (call,) = said[-1]["tool_calls"]
    result = weather(**json.loads(call["function"]["arguments"]))
    said.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return litellm.completion(messages=said, tools=offered, **asked).choices[0].message.content


def structured():
    answer = litellm.completion(messages=messages(CITY), response_format=City, **asked).choices[0].message
    return City.model_validate_json(answer.content).model_dump()


run(chat, stream, tools, structured)
