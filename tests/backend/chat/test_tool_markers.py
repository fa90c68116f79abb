"""Tool calls whose markers are special tokens, as in Mistral's vocabularies: the real model with renamed tokens."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tokenizers import Tokenizer

from backend.chat.chat_template import ChatTemplate
from backend.chat.grammar import GrammarCompiler
from backend.chat.tokenizer import ModelTokenizer
from backend.chat.tool_format import calls_grammar, detect_tool_format
from backend.chat.tools import Tool
from backend.model import ServedModel
from backend.text.detokenizer import TokenBytes
from tests.backend.api.test_server import events
from tests.backend.api.test_tools import ASKING, assembled, body, exchange, function
from tests.backend.chat import tool_templates
from tests.backend.conftest import CHAT, StartServer

RENAMED = {"<repo_name>": "[TOOL_CALLS]", "<reponame>": "[ARGS]", "<file_sep>": "[CALL_ID]"}


@pytest.fixture(scope="module")
def model(model: ServedModel) -> ServedModel:
    """The small model, whose special tokens for code have the names of Mistral's."""
    text = model.tokenizer.fast.to_str()
    for ours, theirs in RENAMED.items():
        assert text.count(json.dumps(ours)) == 2, "in the vocabulary and among the added tokens"
        text = text.replace(json.dumps(ours), json.dumps(theirs))
    token_bytes = TokenBytes(text, model.config.vocab_size)
    template = ChatTemplate(tool_templates.NAMED_WITH_ID, {})
    return dataclasses.replace(model, tokenizer=ModelTokenizer(Tokenizer.from_str(text), token_bytes, template))


async def test_marker_tokens_show_only_in_logprobs(model: ServedModel, start_server: StartServer) -> None:
    """Marker tokens show in logprobs, and not in content, names or arguments, whole and streamed."""
    served = await start_server()
    fields = body(tool_choice="required", logprobs=True, parallel_tool_calls=False)
    choice = (await served.post(CHAT, **fields))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("weather", "clock")
    assert json.loads(call["function"]["arguments"])
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens[0] == "[TOOL_CALLS]"
    assert "[ARGS]" in tokens
    *chunks, _ = await events(served, CHAT, **fields)
    (message,) = assembled(chunks).values()
    assert message["content"] == ""
    assert message["calls"] == [{"type": "function", **call["function"]}]


async def test_several_calls_of_names_that_begin_alike(model: ServedModel, start_server: StartServer) -> None:
    """Each of several calls names one of the tools with that tool's arguments, though the names share a prefix."""
    served = await start_server()
    tools = [function("get", "a"), function("get_x", "b"), function("get_x.y", "c")]
    asked = [{"role": "user", "content": "Go."}]
    another = {str(model.tokenizer.token_bytes.special_ids["[TOOL_CALLS]"]): 100}  # rather than the end
    drawn = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 120, "logit_bias": another}
    fields = body(messages=asked, tools=tools, tool_choice="required", **drawn)
    whole = await served.post(CHAT, **fields)
    *chunks, _ = await events(served, CHAT, **fields)
    streamed = assembled(chunks)
    most = 0
    for choice in whole["choices"]:
        calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
        assert [{k: v for k, v in call.items() if k != "type"} for call in streamed[choice["index"]]["calls"]] == calls
        whole_ones = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
        for call in whole_ones:
            arguments = {"get": {"a"}, "get_x": {"b"}, "get_x.y": {"c"}}
            assert json.loads(call["arguments"]).keys() == arguments[call["name"]]
        most = max(most, len(whole_ones))
    assert most >= 2


async def test_markers_in_the_history_are_tokens_and_in_messages_text(
    model: ServedModel, start_server: StartServer
) -> None:
    """The template's markers in the history are tokens, and markers in a message are text."""
    served = await start_server()
    marker = model.tokenizer.token_bytes.special_ids["[TOOL_CALLS]"]
    messages = exchange("Rome", "[TOOL_CALLS]f[ARGS]{}", "a1B2c3D4e")
    async with served.client.post("/tokenize", json={"messages": messages}) as response:
        tokens = (await response.json())["tokens"]
    assert tokens.count(marker) == 1
    answer = await served.post(CHAT, **body(messages=ASKING, tool_choice="none"))
    assert "tool_calls" not in answer["choices"][0]["message"]


def test_the_grammar_allows_calls_with_and_without_an_id(model: ServedModel) -> None:
    """The grammar allows a call with and without an id, and nothing else between the markers than name and id."""
    form = detect_tool_format(tool_templates.NAMED_WITH_ID)
    assert form is not None
    specials = model.tokenizer.token_bytes.special_ids
    grammars = GrammarCompiler(model.tokenizer.fast, model.config.vocab_size, model.config.eos_token_ids)
    tool = Tool("f", {"type": "object"}, strict=False, field="tools[0]")
    grammar = calls_grammar(form, specials, [tool], required=True, parallel=True, answer=None)

    def accepted(text: str) -> bool:
        constraint = grammars.constraint(grammar)
        for token in model.tokenizer.fast.encode(text, add_special_tokens=False).ids:
            if not constraint.allowed()[token]:
                return False
            constraint.accept(token)
        return bool(constraint.allowed()[model.config.eos_token_ids[0]])

    assert accepted("[TOOL_CALLS]f[ARGS]{}")
    assert accepted("[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}")
    assert accepted('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}')
    assert not accepted("[TOOL_CALLS]f[CALL_ID]short[ARGS]{}")
    assert not accepted("[TOOL_CALLS]g[ARGS]{}")
    assert not accepted("[TOOL_CALLS]f{}")
    assert not accepted("[TOOL_CALLS]f[ARGS]{}[ARGS]")
    assert not accepted("f[ARGS]{}")
