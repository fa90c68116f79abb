# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""The OpenAI Agents SDK; `via` of the arguments is its API: responses, which is its default, or chat."""

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)  # fmt: skip
from openai import AsyncOpenAI
from program import ARGUMENTS, CHAT, CITY, KEY, LIMIT, MODEL, STREAM, V1, WEATHER, City, run, weather

set_tracing_disabled(True)
set_default_openai_api("responses" if ARGUMENTS["via"] == "responses" else "chat_completions")


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return weather(city)


def agent(**options):
    # A client belongs to the event loop of one check.
    set_default_openai_client(AsyncOpenAI(base_url=V1, api_key=KEY), use_for_tracing=False)
    return Agent(name="tester", model=MODEL, model_settings=ModelSettings(max_tokens=LIMIT), **options)


async def chat():
    return (await Runner.run(agent(), CHAT)).final_output


async def stream():
    run = Runner.run_streamed(agent(), STREAM)
    parts = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return "".join(parts)


async def tools():
    return (await Runner.run(agent(tools=[get_weather]), WEATHER)).final_output


async def structured():
    return (await Runner.run(agent(output_type=City), CITY)).final_output.model_dump()


run(chat, stream, tools, structured)
