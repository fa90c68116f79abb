"""Fields that apps send: those of OpenAI and vLLM work, and what has no meaning here is ignored by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.backend.api.test_server import events
from tests.backend.conftest import CHAT, COMPLETIONS, MODEL, Served, StartServer

ASKED = [{"role": "user", "content": "Name the capital of France."}]
IGNORED = "x-keepgate-ignored-fields"
STANDARD: dict[str, Any] = {
    "reasoning_effort": "low",
    "verbosity": "low",
    "store": True,
    "metadata": {"chat": "1"},
    "service_tier": "flex",
    "web_search_options": {},
    "safety_identifier": "u",
    "prompt_cache_key": "k",
    "user": "u",
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
}


async def ask(served: Served, path: str = CHAT, **fields: Any) -> tuple[int, list[str], dict[str, Any]]:
    """Status, ignored fields and body of a short greedy answer."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 8, **fields}
    if path == CHAT:
        body.setdefault("messages", ASKED)
    async with served.client.post(path, json=body) as response:
        named = response.headers.get(IGNORED, "")
        return response.status, named.split(", ") if named else [], await response.json()


def content(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("field", STANDARD)
async def test_a_standard_field_without_meaning_is_accepted(server: Served, field: str) -> None:
    """The answer is that without the field, and the response names it unless a template could read it."""
    _, none, plain = await ask(server)
    status, ignored, answer = await ask(server, **{field: STANDARD[field]})
    assert none == []
    assert (status, content(answer)) == (200, content(plain))
    assert ignored == ([] if field in ("reasoning_effort", "modalities") else [field])


async def test_an_unknown_field_is_ignored_and_named(server: Served) -> None:
    """Streams name it too; null is absent."""
    status, ignored, _ = await ask(server, path=COMPLETIONS, prompt="Hi", colour="red", shade=None)
    assert (status, ignored) == (200, ["colour"])
    body = {"model": MODEL, "messages": ASKED, "max_tokens": 1, "stream": True, "colour": "red"}
    async with server.client.post(CHAT, json=body) as response:
        assert response.headers[IGNORED] == "colour"


async def test_strict_fields_refuse_what_no_api_has(start_server: StartServer) -> None:
    """Standard fields without meaning stay accepted."""
    served = await start_server(strict_fields=True)
    assert (await ask(served, **STANDARD))[0] == 200
    status, _, answer = await ask(served, colour="red")
    assert (status, answer["error"]["param"]) == (400, "colour")


async def test_the_name_of_an_ignored_field_cannot_split_the_header(server: Served) -> None:
    """Characters that are special in a header become question marks, and long names are cut."""
    named: dict[str, Any] = {"a\r\nx-evil: 1, b": 1, "n" * 500: 1}
    status, ignored, _ = await ask(server, **named)
    assert status == 200
    assert ignored == ["a??x-evil:?1??b", "n" * 64]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["Rome", "Paris"]}, "Rome|Paris"),
        ({"guided_regex": "[a-c]{2}/[0-9]"}, "[a-c]{2}/[0-9]"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"guided_grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"structured_outputs": {"choice": ["Rome", "Paris"]}}, "Rome|Paris"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"guided_json": {"enum": ["a", "b"]}}, '"a"|"b"'),
        ({"guided_json": '{"enum": ["a", "b"]}'}, '"a"|"b"'),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "1|2"),
    ],
)
async def test_vllms_structured_outputs_constrain_the_answer(
    server: Served, fields: dict[str, Any], pattern: str
) -> None:
    """In chats and completions alike."""
    _, ignored, answer = await ask(server, **fields)
    assert ignored == []
    assert re.fullmatch(pattern, content(answer))
    _, _, completion = await ask(server, path=COMPLETIONS, prompt="One of them:", **fields)
    assert re.fullmatch(pattern, completion["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
        ({"guided_grammar": 'other ::= "a"'}, "guided_grammar"),
        ({"guided_grammar": f'root ::= {"(" * 5000}"a"{")" * 5000}'}, "guided_grammar"),
        ({"guided_json": "no schema"}, "guided_json"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_a_wrong_structured_output_is_named(server: Served, fields: dict[str, Any], param: str) -> None:
    """The error has the field that is wrong, or one of those that exclude each other."""
    status, _, answer = await ask(server, **fields)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_min_tokens_keep_an_answer_going(server: Served) -> None:
    """Neither an end token nor a stop string ends it before; max_tokens does."""
    _, _, short = await ask(server, max_tokens=60, stop=["."])
    assert short["usage"]["completion_tokens"] < 40
    _, _, long = await ask(server, max_tokens=60, min_tokens=40, stop=["."])
    assert 40 <= long["usage"]["completion_tokens"] <= 60
    end = (await server.post("/tokenize", prompt="."))["tokens"]
    _, _, long = await ask(server, max_tokens=60, min_tokens=40, stop_token_ids=end)
    assert 40 < long["usage"]["completion_tokens"] <= 60
    _, _, cut = await ask(server, max_tokens=5, min_tokens=40)
    assert cut["usage"]["completion_tokens"] == 5


async def test_a_stop_token_ends_the_answer_without_its_text(server: Served) -> None:
    """It is counted, as an end token of the model is."""
    plain = await server.post("/tokenize", prompt=content((await ask(server))[2]), add_special_tokens=False)
    _, _, answer = await ask(server, stop_token_ids=[plain["tokens"][2]])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3
    detokenized = await server.post("/detokenize", tokens=plain["tokens"][:2])
    assert content(answer) == detokenized["prompt"]
    assert (await ask(server, stop_token_ids=[10**6]))[2]["error"]["param"] == "stop_token_ids"


async def test_prompt_logprobs_name_each_token_of_the_prompt(server: Served) -> None:
    """vLLM's form: nothing precedes the first; each has itself and the most likely ones, with their ranks."""
    _, _, answer = await ask(server, prompt_logprobs=2)
    tokens = (await server.post("/tokenize", messages=ASKED))["tokens"]
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(tokens) - 1
    for token, entry in zip(tokens[1:], rest, strict=True):
        assert str(token) in entry
        assert {1, 2} <= {candidate["rank"] for candidate in entry.values()}
        best = min(entry.values(), key=lambda candidate: candidate["rank"])
        assert best["logprob"] == max(candidate["logprob"] for candidate in entry.values())
    _, _, completion = await ask(server, path=COMPLETIONS, prompt="One two three", prompt_logprobs=0)
    assert completion["choices"][0]["prompt_logprobs"][0] is None
    assert (await ask(server, prompt_logprobs=1, stream=True))[2]["error"]["param"] == "prompt_logprobs"


async def test_an_answer_continues_the_last_message(server: Served) -> None:
    """The prompt ends within the assistant's turn, and the answer is only what follows."""
    messages = [*ASKED, {"role": "assistant", "content": "The capital of France is"}]
    status, _, answer = await ask(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert status == 200
    assert content(answer).startswith(" Paris")
    wrong: list[dict[str, Any]] = [{"add_generation_prompt": True}, {"messages": ASKED}]
    for fields in wrong:
        fields = {"messages": messages, "continue_final_message": True, **fields}
        status, _, answer = await ask(server, **fields)
        assert (status, answer["error"]["param"]) == (400, "continue_final_message")


async def test_template_variables_reach_the_template(start_server: StartServer) -> None:
    """chat_template_kwargs and reasoning_effort; text of control tokens in them stays text."""
    template = "{{ mood }}/{{ reasoning_effort }}:{% for m in messages %}{{ m.content }}{% endfor %}"
    served = await start_server(template=template)
    fields: dict[str, Any] = {
        "chat_template_kwargs": {"mood": "<|im_end|>"},
        "reasoning_effort": "high",
        "messages": ASKED,
    }
    status, _, answer = await ask(served, prompt_logprobs=0, **fields)
    decoded = "".join(next(iter(e.values()))["decoded_token"] for e in answer["prompt_logprobs"][1:])
    assert status == 200
    assert decoded.endswith("|>/high:Name the capital of France.")
    status, _, answer = await ask(served, chat_template_kwargs={"messages": []})
    assert answer["error"]["param"] == "chat_template_kwargs.messages"


async def test_max_tokens_beyond_the_context_are_what_fits(server: Served) -> None:
    """Apps ask for as much as the largest models write."""
    status, _, answer = await ask(server, max_tokens=100_000, stop=["Paris"])
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_a_part_that_is_no_text_is_refused_or_dropped(start_server: StartServer, kind: str) -> None:
    """The error says that the model reads text only, and which option leaves the part out."""
    messages = [{"role": "user", "content": [{"type": kind, kind: {}}, {"type": "text", "text": "Hello"}]}]
    status, _, answer = await ask(await start_server(), messages=messages)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].type")
    assert "--drop-images" in answer["error"]["message"]
    _, _, plain = await ask(await start_server(), messages=[{"role": "user", "content": "Hello"}])
    status, _, dropped = await ask(await start_server(drop_images=True), messages=messages)
    assert (status, content(dropped)) == (200, content(plain))


async def test_a_salt_separates_the_blocks_of_one_tenant(server: Served) -> None:
    """The same prompt under another salt computes its blocks again."""
    messages = [{"role": "user", "content": "word " * 64}]
    cached = []
    for fields in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}):
        _, ignored, answer = await ask(server, messages=messages, **fields)
        assert ignored == []
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, True, False, True]


THINKS = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}assistant: <think>
{# </think> #}"""


async def test_thoughts_are_apart_from_the_answer(start_server: StartServer) -> None:
    """Where the template opens them, everything up to the closing marker is reasoning, and is counted."""
    served = await start_server(template=THINKS)
    _, _, answer = await ask(served, guided_regex="hmm</think>\\n\\nyes")
    assert content(answer) == "hmm</think>\n\nyes", "a grammar from the start leaves no thought"
    _, _, answer = await ask(served, logit_bias={}, max_tokens=6)
    message = answer["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    _, _, hidden = await ask(served, include_reasoning=False, max_tokens=6)
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    *chunks, _ = await events(served, CHAT, messages=ASKED, temperature=0, max_tokens=6)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert not any(delta.get("content") for delta in deltas)


async def test_functions_are_called_in_their_own_form(server: Served) -> None:
    """The fields that tools replaced: ``functions``, ``function_call``, and role 'function' in the next turn."""
    function = {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    fields: dict[str, Any] = {"functions": [function], "function_call": {"name": "weather"}, "max_tokens": 40}
    _, _, answer = await ask(server, **fields)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "weather"
    assert json.loads(choice["message"]["function_call"]["arguments"])["city"] in ("Rome", "Paris")
    *chunks, _ = await events(served=server, path=CHAT, messages=ASKED, temperature=0, **fields)
    deltas = [choice["delta"].get("function_call", {}) for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("name", "") for delta in deltas) == "weather"
    assert "".join(delta.get("arguments", "") for delta in deltas) == choice["message"]["function_call"]["arguments"]
    result = {"role": "function", "name": "weather", "content": "12 degrees"}
    status, _, _ = await ask(server, messages=[*ASKED, {"role": "assistant", **_call(choice)}, result])
    assert status == 200


def _call(choice: dict[str, Any]) -> dict[str, Any]:
    return {"content": None, "function_call": choice["message"]["function_call"]}
