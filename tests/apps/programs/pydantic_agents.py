# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""pydantic-ai, by the model that `via` of the arguments names: chat, responses or anthropic."""

from program import ARGUMENTS, CHAT, CITY, KEY, LIMIT, MODEL, ROOT, STREAM, V1, WEATHER, City, run, weather
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

via = ARGUMENTS["via"]


def agent(**options):
    if via == "anthropic":
        model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ROOT, api_key=KEY))
    else:
        kind = OpenAIChatModel if via == "chat" else OpenAIResponsesModel
        model = kind(MODEL, provider=OpenAIProvider(base_url=V1, api_key=KEY))
    return Agent(model, model_settings={"max_tokens": LIMIT}, **options)


async def chat():
    return (await agent().run(CHAT)).output


async def stream():
    async with agent().run_stream(STREAM) as result:
        return "".join([part async for part in result.stream_text(delta=True)])


async def tools():
    teller = agent()

    @teller.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return weather(city)

    return (await teller.run(WEATHER)).output


async def structured():
    return (await agent(output_type=City).run(CITY)).output.model_dump()


async def structured_natively():
    return (await agent(output_type=NativeOutput(City)).run(CITY)).output.model_dump()


run(chat, stream, tools, structured, *([structured_natively] if via != "anthropic" else []))
