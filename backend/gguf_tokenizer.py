"""The tokenizer that a GGUF file describes, as ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.errors import ModelError
from backend.gguf_config import GgufMetadata

# Pre-tokenizers by GGUF's name for them; each is what the models under that name were trained with.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = _QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_BYTE_LEVEL_PRE = ("smollm", "gpt-2", "qwen2", "llama-bpe")
_ORDINARY_TOKEN, _CONTROL_TOKEN, _USER_TOKEN = 1, 3, 4
_SPACE = "▁"


def write_tokenizer(metadata: GgufMetadata, target: Path) -> None:
    """Writes the tokenizer that the metadata describe into the directory ``target``.

    Two kinds are known by GGUF: "gpt2" is BPE over bytes, "llama" is SentencePiece's BPE over characters, with tokens
    for single bytes where a character is not in the vocabulary.

    Raises:
        ModelError: a field is missing; another kind, or one that splits text in a way that is not known here.
    """
    from tokenizers import AddedToken

    kind, pre = metadata.tokenizer("model"), metadata.tokenizer("pre", "default")
    if kind == "gpt2" and pre in _BYTE_LEVEL_PRE:
        tokenizer = _byte_level(metadata, pre)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ModelError(
            f"{metadata.source}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported in GGUF "
            f"(supported: 'llama', and 'gpt2' with {', '.join(_BYTE_LEVEL_PRE)}); use the model's safetensors directory"
        )
    tokens: list[str] = metadata.need_tokenizer("tokens")
    for token, token_type in zip(tokens, metadata.need_tokenizer("token_type"), strict=True):
        if token_type == _CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_TOKEN:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    # SentencePiece's models begin with the token unless the file says otherwise; those over bytes only if it says so.
    bos = metadata.tokenizer("bos_token_id")
    if metadata.tokenizer("add_bos_token", kind == "llama") and bos is not None:
        _prepend_bos(tokenizer, tokens[bos])
    tokenizer.save(str(target / "tokenizer.json"))
    special = {
        f"{name}_token": tokens[token]
        for name in ("bos", "eos")
        if (token := metadata.tokenizer(f"{name}_token_id")) is not None
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if template := metadata.fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (target / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level(metadata: GgufMetadata, pre: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitters: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_PATTERN), "isolated"), byte_level],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), "isolated"), byte_level],
    }
    tokens: list[str] = metadata.need_tokenizer("tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.need_tokenizer("merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: GgufMetadata) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens: list[str] = metadata.need_tokenizer("tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.tokenizer("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, metadata.need_tokenizer("scores"), metadata.need_tokenizer("token_type")),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    parts: list[Any] = [normalizers.Replace(" ", _SPACE)]
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.tokenizer("add_space_prefix", True):
        parts.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(parts)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(vocab: Mapping[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose whole has the best score; here that is an order of pairs.

    Every way to cut a token into two tokens is a pair; all pairs of one whole are as good as each other. Only ordinary
    tokens are wholes: text must not grow into a control token.
    """
    ranked = []
    for token, index in vocab.items():
        if types[index] != _ORDINARY_TOKEN:
            continue
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        ranked += [(-scores[index], index, vocab[left], vocab[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _prepend_bos(tokenizer: Any, bos: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
