# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""LangChain, by the package that `via` of the arguments names: openai, openai-responses, anthropic or ollama."""

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from program import ARGUMENTS, CHAT, CITY, KEY, LIMIT, MODEL, ROOT, STREAM, V1, WEATHER, City, run, weather

via = ARGUMENTS["via"]
if via.startswith("openai"):
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    model = ChatOpenAI(
        model=MODEL, base_url=V1, api_key=KEY, max_tokens=LIMIT, use_responses_api=via == "openai-responses"
    )
elif via == "anthropic":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=ROOT, api_key=KEY, max_tokens=LIMIT)
else:
    from langchain_ollama import ChatOllama

    headers = {"Authorization": f"Bearer {KEY}"}
    model = ChatOllama(model=MODEL, base_url=ROOT, num_predict=LIMIT, client_kwargs={"headers": headers})


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return weather(city)


def chat():
    return model.invoke(CHAT).text


def stream():
    return "".join(chunk.text for chunk in model.stream(STREAM))


def tools():
    bound = model.bind_tools([get_weather])
    said = [HumanMessage(WEATHER)]
    said.append(bound.invoke(said))
    (call,) = said[-1].tool_calls
    said.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    return bound.invoke(said).text


def structured():
    return model.with_structured_output(City).invoke(CITY).model_dump()


async def concurrent():
    return [answer.text for answer in await model.abatch(["One.", "Two."])]


def embeddings():
    # Without check_embedding_ctx_length=False it sends the token ids of OpenAI's own models.
    made = OpenAIEmbeddings(model=MODEL, base_url=V1, api_key=KEY, check_embedding_ctx_length=False)
    return len(made.embed_documents(["one", "two"]))


run(chat, stream, tools, structured, concurrent, *([embeddings] if via == "openai" else []))
