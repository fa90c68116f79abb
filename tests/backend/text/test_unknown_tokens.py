"""Tokens beyond the model's embedding are refused before any step looks them up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from backend.chat.grammar import GrammarCompiler, json_schema
from backend.chat.tokenizer import ModelTokenizer
from backend.engine.engine import Engine
from backend.engine.sequence import SamplingParams, Sequence
from backend.errors import InvalidRequest, ModelError
from backend.model import ServedModel
from backend.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, Message, TokenizeRequest
from backend.quantization.calibration.text import token_windows
from backend.requests.reader import RequestReader
from backend.text.detokenizer import Detokenizer, TokenBytes

PAD = "<pad>"


def with_pad(model: ServedModel, begins: bool = False) -> ServedModel:
    """The model with a token that its embedding has no row for; every text begins with it, if it ``begins`` so."""
    values: dict[str, Any] = json.loads(model.tokenizer.fast.to_str())
    rows = model.config.vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values["added_tokens"].append({"id": rows, "content": PAD, "special": False, **flags})
    if begins:
        text, pad = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": PAD, "type_id": 0}}
        values["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [pad, text],
            "pair": [pad, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {PAD: {"id": PAD, "ids": [99_999], "tokens": [PAD]}},
        }
    changed = json.dumps(values)
    tokenizer = ModelTokenizer(Tokenizer.from_str(changed), TokenBytes(changed, rows), model.tokenizer.chat_template)
    return dataclasses.replace(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def padded(model: ServedModel) -> ServedModel:
    """A model with a padding token beyond its embedding, as many fine-tunes have."""
    return with_pad(model)


def readers(model: ServedModel) -> RequestReader:
    return RequestReader(model, max_sequences=8, accepts_priority=True)


def test_a_prompt_with_a_token_that_has_no_row_is_refused(padded: ServedModel) -> None:
    """Every kind of prompt with a token beyond the embedding is refused with the token and the number of rows."""
    asked = readers(padded)
    rows = padded.config.vocab_size
    chat = [Message(role="user", content=f"a {PAD}")]
    name = padded.name
    for where, ask in (
        ("prompt", lambda: asked.completions.read(CompletionRequest(model=name, prompt=f"a {PAD}"))),
        ("prompt[1]", lambda: asked.completions.read(CompletionRequest(model=name, prompt=["a", PAD]))),
        ("input", lambda: asked.embeddings.read(EmbeddingRequest(model=name, input=PAD))),
        ("messages", lambda: asked.chats.read(ChatRequest(model=name, messages=chat))),
        ("messages", lambda: asked.tokens.ids(TokenizeRequest(messages=chat))),
    ):
        with pytest.raises(InvalidRequest) as refused:
            ask()
        assert refused.value.message == (
            f"{where}: the tokenizer makes the token '{PAD}' of id {rows}, but the model's embedding has {rows} rows; "
            "expected a prompt without it"
        )
        assert refused.value.param == where
    assert asked.completions.read(CompletionRequest(model=name, prompt="a pad")).prompt_tokens == 2
    asked.close()


def test_an_unknown_token_before_every_text_is_refused(model: ServedModel) -> None:
    """A token beyond the embedding that the tokenizer puts before every text is refused by its id."""
    asked = readers(with_pad(model, begins=True))
    with pytest.raises(InvalidRequest, match="prompt: the tokenizer makes a token of id 99999, but"):
        asked.completions.read(CompletionRequest(model=model.name, prompt="a"))
    asked.close()


def test_an_unknown_token_can_still_be_tokenized(padded: ServedModel) -> None:
    """`/tokenize` returns the id of a token beyond the embedding, whose text is empty."""
    asked = readers(padded)
    ids = asked.tokens.ids(TokenizeRequest(prompt=f"a{PAD}"))
    assert ids[-1] == padded.config.vocab_size
    assert asked.tokens.texts(ids) == ["a", ""]
    asked.close()


def test_a_schema_allows_only_tokens_with_a_row(padded: ServedModel) -> None:
    """A schema's mask covers exactly the tokens that have an embedding row."""
    rows = padded.config.vocab_size
    grammars = GrammarCompiler(padded.tokenizer.fast, rows, padded.config.eos_token_ids)
    allowed = grammars.constraint("start: value\nvalue: " + json_schema({"type": "string"})).allowed()
    grammars.close()
    assert allowed.shape == (rows,)
    assert 0 < int(allowed.sum()) < rows


def test_the_engine_refuses_unknown_tokens(model: ServedModel) -> None:
    """The engine refuses a sequence with a token beyond the embedding."""
    engine = Engine(model.runner, 1, None)
    unknown = [1, model.config.vocab_size]
    with pytest.raises(ValueError, match="has a token that is not in the embedding"):
        engine.add(Sequence(0, unknown, SamplingParams(max_tokens=1), Detokenizer(model.tokenizer.token_bytes), 0))
    assert not engine.has_work


def test_a_calibration_text_with_an_unknown_token_is_refused(padded: ServedModel, tmp_path: Path) -> None:
    """A calibration text with a token beyond the embedding is refused."""
    (tmp_path / "text.txt").write_text(f"a {PAD} " * 50)
    rows = padded.config.vocab_size
    with pytest.raises(ModelError, match=rf"text\.txt: the tokenizer makes the token '{PAD}' of id {rows}, but"):
        token_windows(padded.tokenizer.fast, tmp_path / "text.txt", 2, 8, rows=rows)
    (tmp_path / "text.txt").write_text("a b " * 50)
    assert token_windows(padded.tokenizer.fast, tmp_path / "text.txt", 2, 8, rows=rows).shape == (2, 8)
