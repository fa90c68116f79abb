"""With JSON mode or a JSON schema, every answer that ends is what was asked for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

from backend.chat.grammar import GrammarCompiler, GrammarError, json_schema
from backend.engine.sampler import sample
from backend.engine.sequence import SamplingParams, Sequence
from backend.model import ServedModel
from backend.text.detokenizer import Detokenizer
from tests.backend.api.test_server import events
from tests.backend.conftest import CHAT, MODEL, Served

QUESTION = [{"role": "user", "content": "Ann is 7 years old and likes red. Write that as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["age", "colour", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "maxLength": 5}},
}


def body(**fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    return {"messages": QUESTION, "response_format": form, "temperature": 0, "max_tokens": 120, **fields}


def assert_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["age", "colour", "tags"]
    assert 0 <= value["age"] <= 120
    assert value["colour"] in ("red", "green")
    assert len(value["tags"]) <= 2
    assert all(len(tag) <= 5 for tag in value["tags"])


async def test_a_schema_is_kept_however_the_answer_is_drawn(server: Served) -> None:
    """Greedy answers and several answers at a high temperature all follow the schema."""
    for fields in ({}, {"temperature": 2.0, "seed": 4, "n": 3}):
        answer = await server.post(CHAT, **body(**fields))
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            assert_person(choice["message"]["content"])


async def test_streams_seeds_and_logprobs_are_as_without_a_schema(server: Served) -> None:
    """With a schema a stream joins to the whole answer, a seed repeats it, and logprobs are the model's own."""
    fields = body(temperature=1.2, seed=9, logprobs=True, top_logprobs=2)
    whole = (await server.post(CHAT, **fields))["choices"][0]
    assert (await server.post(CHAT, **fields))["choices"][0] == whole
    *chunks, done = await events(server, CHAT, **fields)
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole["message"]["content"]
    entries = whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == whole["message"]["content"]
    # What the model would have liked better is still shown, although it could not be chosen.
    assert any(entry["logprob"] < entry["top_logprobs"][0]["logprob"] for entry in entries)


async def test_json_mode(server: Served) -> None:
    """JSON mode answers with an object, whatever the question."""
    form = {"type": "json_object"}
    answer = await server.post(CHAT, **body(response_format=form, max_tokens=200))
    choice = answer["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


async def test_an_answer_that_is_complete_at_the_limit_is_complete(server: Served) -> None:
    """An answer that is complete at `max_tokens` ends with `stop`, as only the end token could follow."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    whole = await server.post(CHAT, **body(response_format=form))
    tokens = whole["usage"]["completion_tokens"]
    assert json.loads(whole["choices"][0]["message"]["content"]) == {"a": 1}
    short = await server.post(CHAT, **body(response_format=form, max_tokens=tokens - 1))
    assert short["choices"][0] == whole["choices"][0]
    cut = await server.post(CHAT, **body(response_format=form, max_tokens=tokens - 2))
    assert cut["choices"][0]["finish_reason"] == "length"


async def test_logit_bias_cannot_break_the_schema(server: Served, model: ServedModel) -> None:
    """`logit_bias` moves the choice among the tokens that the schema allows, and no further."""
    bias = {str(model.tokenizer.fast.encode(text).ids[0]): 100 for text in ("Hello", "<|im_end|>")}
    answer = await server.post(CHAT, **body(logit_bias=bias))
    assert_person(answer["choices"][0]["message"]["content"])


async def test_a_schema_that_grows_too_complex_is_a_400(server: Served) -> None:
    """A schema that grows too complex during an answer ends its request alone with a 400 that quotes nothing."""
    form = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1500)}}
    fields = body(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": form}})
    beside = asyncio.create_task(server.post(CHAT, **body()))
    async with server.client.post(CHAT, json={"model": MODEL, **fields}) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert "too complex" in error["message"]
    assert len(error["message"]) < 300
    assert_person((await beside)["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def grammars(model: ServedModel) -> GrammarCompiler:
    return GrammarCompiler(model.tokenizer.fast, model.config.vocab_size, model.config.eos_token_ids)


def test_two_answers_share_a_compiled_grammar(grammars: GrammarCompiler) -> None:
    """Two answers share a compiled grammar and follow it independently."""
    first, second = (grammars.constraint('start: "ab" | "cd"') for _ in range(2))
    assert torch.equal(first.allowed(), second.allowed())
    first.accept(int(first.allowed().nonzero()[0]))
    assert not torch.equal(first.allowed(), second.allowed())


def test_the_grammar_cache_is_bounded_by_size(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache keeps the most recently used grammars whose texts together are within the limit."""
    # What is cached shows in no result, so the private call that compiles is recorded; the limit is no option.
    compiled: list[str] = []
    compile_one = grammars._compile

    def noted(grammar: str) -> Any:
        compiled.append(grammar)
        return compile_one(grammar)

    monkeypatch.setattr(grammars, "_compile", noted)
    texts = [f'start: "{letter * 400}"' for letter in "abc"]
    monkeypatch.setattr("backend.chat.grammar._MAX_CACHED_BYTES", 1000)
    for text in (texts[0], texts[1], texts[0], texts[2], texts[0], texts[1]):
        grammars.constraint(text)
    assert compiled == [texts[0], texts[1], texts[2], texts[1]]


def test_a_grammar_ends_with_the_end_token(grammars: GrammarCompiler, model: ServedModel) -> None:
    """When a grammar allows no further text, the answer is complete and only end tokens are allowed."""
    constraint = grammars.constraint('start: "yes"')
    (token,) = model.tokenizer.fast.encode("yes").ids
    assert constraint.allowed()[token]
    assert not constraint.complete
    constraint.accept(token)
    assert constraint.complete
    assert constraint.allowed().nonzero().flatten().tolist() == list(model.config.eos_token_ids)


def test_a_token_that_is_not_allowed_ends_the_answer_with_an_error(
    grammars: GrammarCompiler, model: ServedModel
) -> None:
    """A token that the grammar forbids sets the constraint's error, and only end tokens are allowed afterwards."""
    constraint = grammars.constraint('start: "yes"')
    constraint.accept(model.tokenizer.fast.encode("no").ids[0])
    assert constraint.error
    assert not constraint.complete
    assert constraint.allowed().nonzero().flatten().tolist() == list(model.config.eos_token_ids)


@pytest.mark.parametrize("schema", [{"type": "wizard"}, {"type": "string", "format": "wizard"}, {"if": {}}])
def test_a_wrong_schema_says_what_is_wrong(grammars: GrammarCompiler, schema: dict[str, Any]) -> None:
    """An invalid schema is refused in one line without the compiler's own words."""
    with pytest.raises(GrammarError) as caught:
        grammars.constraint(f"start: {json_schema(schema)}")
    assert "\n" not in str(caught.value)
    assert "verbose" not in str(caught.value)
    assert "failed to compile" not in str(caught.value)


def test_only_allowed_tokens_are_drawn(grammars: GrammarCompiler, model: ServedModel) -> None:
    """Only allowed tokens are drawn, whatever the temperature and filters."""
    constraint = grammars.constraint("start: /[0-9]+/")
    allowed = set(constraint.allowed().nonzero().flatten().tolist())
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"temperature": 2.0, "top_k": 50},
        {"temperature": 2.0, "top_p": 0.99},
        {"temperature": 2.0, "min_p": 0.001},
    ]
    for seed, some in enumerate(params * 4):
        sampling = SamplingParams(max_tokens=5, **some)
        detokenizer = Detokenizer(model.tokenizer.token_bytes)
        sequence = Sequence(seed, [5], sampling, detokenizer, seed, constraint=grammars.constraint("start: /[0-9]+/"))
        logits = torch.randn(1, model.config.vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
        assert sample(logits, [sequence])[0].token_id in allowed
