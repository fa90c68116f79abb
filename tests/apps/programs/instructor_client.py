# What it imports is installed in an environment of its own.
# mypy: ignore-errors
"""instructor, by tools and by JSON schema."""

import instructor
from openai import OpenAI
from program import CITY, KEY, LIMIT, MODEL, V1, City, messages, run


def ask(mode):
    client = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY), mode=mode)
    answer = client.chat.completions.create(
        model=MODEL, messages=messages(CITY), response_model=City, max_tokens=LIMIT, max_retries=0
    )
    return answer.model_dump()


def structured():
    return ask(instructor.Mode.TOOLS)


def structured_natively():
    return ask(instructor.Mode.JSON_SCHEMA)


run(structured, structured_natively)
