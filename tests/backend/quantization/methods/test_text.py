"""Calibration windows come from all parts of a text, and an unusable text is refused in one line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from backend.errors import ModelError
from backend.quantization.calibration.text import token_windows

WORDS = 2000


def tokenizer(begins: bool = False) -> Tokenizer:
    """Word ``w7`` is token 7; with a token of its own in front of every text if it ``begins`` so."""
    made = Tokenizer(WordLevel({**{f"w{n}": n for n in range(WORDS)}, "<s>": WORDS}, unk_token="<s>"))
    made.pre_tokenizer = WhitespaceSplit()
    if begins:
        made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", WORDS)])
    return made


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every word once, in order."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"w{n}" for n in range(WORDS)))
    return path


@given(windows=st.integers(1, 40), tokens=st.integers(1, 50), seed=st.integers(0, 2**31), begins=st.booleans())
def test_windows_are_spread_and_never_overlap(text: Path, windows: int, tokens: int, seed: int, begins: bool) -> None:
    """Each window lies in its own share of the text, and the same seed gives the same windows."""
    got = token_windows(tokenizer(begins), text, windows, tokens, seed)
    assert got.shape == (windows, tokens)
    assert torch.equal(got, token_windows(tokenizer(begins), text, windows, tokens, seed))
    if begins:
        assert bool((got[:, 0] == WORDS).all())
        got = got[:, 1:]
    share = WORDS // windows
    for index, window in enumerate(got.tolist()):
        assert window == list(range(window[0], window[0] + len(window))) if window else True
        assert all(index * share <= token < (index + 1) * share for token in window)


def test_another_seed_gives_other_windows(text: Path) -> None:
    """Another seed gives other windows."""
    one, other = (token_windows(tokenizer(), text, 8, 16, seed) for seed in (0, 1))
    assert not torch.equal(one, other)


def test_a_compressed_text_is_the_same_text(text: Path, tmp_path: Path) -> None:
    """A gzip text gives the windows of the plain text, whatever the file's name."""
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    assert torch.equal(token_windows(tokenizer(), packed, 4, 32), token_windows(tokenizer(), text, 4, 32))


def test_a_text_may_be_just_long_enough(text: Path) -> None:
    """A text of exactly the needed tokens is enough, and one with a token less is refused with both numbers."""
    assert token_windows(tokenizer(), text, 4, WORDS // 4).shape == (4, WORDS // 4)
    with pytest.raises(ModelError, match=r"2,000 tokens, and 4 windows of 501 need 2,004"):
        token_windows(tokenizer(), text, 4, WORDS // 4 + 1)
