"""Settings that a tokenizer file keeps from an earlier use change no prompt."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from backend.chat.tokenizer import ModelTokenizer
from backend.model import ServedModel


def test_truncation_and_padding_of_a_file_are_ignored(model: ServedModel, tmp_path: Path) -> None:
    """Truncation and padding settings of a tokenizer file are ignored, as in transformers."""
    tokenizer = Tokenizer.from_str(model.tokenizer.fast.to_str())
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=16, pad_token="<|im_end|>", pad_id=2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "one two three " * 30
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids[8:] == [2] * 8
    read = ModelTokenizer.load(tmp_path, model.config).fast
    for written in (text, "one", ""):
        assert read.encode(written).ids == model.tokenizer.fast.encode(written).ids
