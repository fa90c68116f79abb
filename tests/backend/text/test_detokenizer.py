"""Text decoded token by token is the same as that decoded at once, for any tokens."""

from __future__ import annotations

import functools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backend.errors import ModelError
from backend.model import ServedModel
from backend.text.detokenizer import Detokenizer, TokenBytes

NO_DEADLINE = settings(deadline=None, max_examples=200)


@pytest.fixture(scope="module")
def tokens(model: ServedModel) -> TokenBytes:
    return model.tokenizer.token_bytes


@pytest.fixture(scope="module")
def tokenizer(model: ServedModel) -> Tokenizer:
    return model.tokenizer.fast


@NO_DEADLINE
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_any_tokens_decode_as_the_tokenizer_decodes_them(
    ids: list[int], tokens: TokenBytes, tokenizer: Tokenizer
) -> None:
    """Random tokens, with broken and cut characters among them, decode to the tokenizer's text."""
    assert Detokenizer(tokens).decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def known_bytes(tokens: TokenBytes) -> frozenset[int]:
    """Bytes that this model's vocabulary has a token for."""
    return frozenset(tokens[token_id][0] for token_id in range(49152) if len(tokens[token_id]) == 1)


@NO_DEADLINE
@given(text=st.text(max_size=40))
def test_any_text_is_restored(text: str, tokens: TokenBytes, tokenizer: Tokenizer, known_bytes: frozenset[int]) -> None:
    """Any text is restored from its tokens one by one, except bytes that the vocabulary has no token for."""
    text = "".join(character for character in text if known_bytes.issuperset(character.encode()))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert Detokenizer(tokens).decode(ids) == text


def test_a_character_is_sent_whole(tokens: TokenBytes, tokenizer: Tokenizer) -> None:
    """A character of many tokens is sent whole and never in part."""
    text = "👨‍👩‍👧‍👦 日本語 é"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text)
    detokenizer = Detokenizer(tokens)
    pieces = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)
    assert detokenizer.finish() == ""


def test_invalid_bytes_become_replacement_characters(tokens: TokenBytes, tokenizer: Tokenizer) -> None:
    """Invalid bytes become U+FFFD as soon as they are known to be invalid, and a cut character at the end."""
    lead = next(i for i in range(49152) if tokens[i] == b"\xf0")
    detokenizer = Detokenizer(tokens)
    assert detokenizer.add(lead) == ""
    assert detokenizer.add(lead) == "�"
    assert detokenizer.finish() == "�"


def test_special_tokens_have_no_text_but_can_be_shown(tokens: TokenBytes, tokenizer: Tokenizer) -> None:
    """Special tokens have no text in an answer, and a name for logprobs."""
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    assert tokens[end] == b""
    assert tokens.shown(end) == b"<|im_end|>"


def test_visible_special_tokens_are_part_of_the_text(tokens: TokenBytes, tokenizer: Tokenizer) -> None:
    """Special tokens that are declared visible are part of the text, and others are not."""
    start, end = (tokens.special_ids[name] for name in ("<|im_start|>", "<|im_end|>"))
    ids = [start, *tokenizer.encode("call", add_special_tokens=False).ids, end]
    assert Detokenizer(tokens).decode(ids) == "call"
    assert Detokenizer(tokens, visible=frozenset({end})).decode(ids) == "call<|im_end|>"


def test_work_does_not_grow_with_the_text(tokens: TokenBytes) -> None:
    """The time for a token does not grow with the text, even if no token completes a character."""
    lead = next(i for i in range(49152) if tokens[i] == b"\x80")

    def seconds(detokenizer: Detokenizer) -> float:
        started = time.perf_counter()
        for _ in range(1000):
            detokenizer.add(lead)
        return time.perf_counter() - started

    detokenizer = Detokenizer(tokens)
    first = min(seconds(detokenizer) for _ in range(3))
    for _ in range(50):
        seconds(detokenizer)
    assert min(seconds(detokenizer) for _ in range(3)) < 5 * first


def test_every_byte_has_its_character_in_the_byte_level_alphabet() -> None:
    """The byte-level alphabet is that of GPT-2 and the tokenizers library."""
    vocab = {character: number for number, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokens = TokenBytes(json.dumps({"model": {"vocab": vocab}, "decoder": {"type": "ByteLevel"}}), 256)
    assert {tokens[number] for number in range(256)} == {bytes([byte]) for byte in range(256)}
    planes = (*range(0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x1000))
    text = "".join(map(chr, planes))
    ((spelled, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert Detokenizer(tokens).decode([vocab[character] for character in spelled]) == text


def sentencepiece_like() -> Tokenizer:
    words = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3, "▁": 260, "▁▁": 261}
    vocab = {**words, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def test_byte_fallback_vocabularies() -> None:
    """In byte-fallback vocabularies <0xE2> is a byte, ▁ is a space, and an answer does not begin with a space."""
    tokenizer = sentencepiece_like()
    tokens = TokenBytes(tokenizer.to_str(), 260)
    ids = [1, 2, 3, *(4 + byte for byte in "é😀".encode())]
    assert Detokenizer(tokens).decode(ids) == tokenizer.decode(ids) == "Hello world!é😀"
    assert Detokenizer(tokens, continues_text=True).decode(ids) == " Hello world!é😀"


def test_a_first_space_is_kept_where_the_decoder_keeps_it() -> None:
    """The first space is kept if the decoder does not strip it."""
    tokenizer = sentencepiece_like()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert Detokenizer(TokenBytes(tokenizer.to_str(), 263)).decode([1, 2]) == tokenizer.decode([1, 2]) == " Hello world"


def test_a_vocabulary_may_be_larger_or_smaller_than_the_embedding() -> None:
    """Tokens without an embedding row have their text, and rows without a token have none."""
    text = sentencepiece_like().to_str()
    assert Detokenizer(TokenBytes(text, 100)).decode([1, 4 + ord("x")]) == "Hellox"
    assert Detokenizer(TokenBytes(text, 300)).decode([1, 299]) == "Hello"


@functools.cache
def stripping() -> tuple[Tokenizer, TokenBytes]:
    """A tokenizer whose decoder strips the first space, and the bytes of its tokens."""
    tokenizer = sentencepiece_like()
    return tokenizer, TokenBytes(tokenizer.to_str(), 263)


WORDS = st.sampled_from([1, 2, 3, 260, 261, 262]).map(lambda token_id: [token_id])
CHARACTERS = st.characters(codec="utf-8").map(lambda character: [4 + byte for byte in character.encode()])


@settings(deadline=None, max_examples=50)
@given(parts=st.lists(WORDS | CHARACTERS, max_size=10))
def test_only_the_first_space_is_left_out(parts: list[list[int]]) -> None:
    """A stripping decoder leaves out one first space, whatever tokens it comes from."""
    tokenizer, tokens = stripping()
    ids = [token_id for part in parts for token_id in part]
    assert Detokenizer(tokens).decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert Detokenizer(tokens).decode([262, 1, *ids]) == tokenizer.decode([1, *ids], skip_special_tokens=True)


def test_a_decoder_of_another_kind_is_refused() -> None:
    """A tokenizer with an unsupported decoder is refused."""
    values = json.loads(sentencepiece_like().to_str())
    values["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ModelError, match="WordPiece"):
        TokenBytes(json.dumps(values), 260)
