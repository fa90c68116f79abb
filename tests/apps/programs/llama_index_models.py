# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""LlamaIndex's OpenAILike."""

from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from program import CHAT, CITY, KEY, LIMIT, MODEL, STREAM, V1, WEATHER, City, run, weather

model = OpenAILike(
    model=MODEL, api_base=V1, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_tokens=LIMIT
)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return weather(city)


def chat():
    return model.chat([ChatMessage(role="user", content=CHAT)]).message.content


def stream():
    return "".join(part.delta or "" for part in model.stream_chat([ChatMessage(role="user", content=STREAM)]))


def tools():
    return model.predict_and_call([FunctionTool.from_defaults(get_weather)], WEATHER).response


def structured():
    return FunctionCallingProgram.from_defaults(output_cls=City, prompt_template_str=CITY, llm=model)().model_dump()


def completion():
    return model.complete("Once upon a time").text


run(chat, stream, tools, structured, completion)
