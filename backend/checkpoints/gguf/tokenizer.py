"""The tokenizer that a GGUF file describes, as ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.checkpoints.gguf.config import GgufMetadata
from backend.checkpoints.gguf.header import shown
from backend.errors import ModelError

# Pre-tokenizers by GGUF name, as used in the training of the models of that name.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = _QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_BYTE_LEVEL_PRE = ("smollm", "gpt-2", "qwen2", "llama-bpe")
_ORDINARY_TOKEN, _CONTROL_TOKEN, _USER_TOKEN = 1, 3, 4
_SPACE = "▁"
_MAX_CUT = 512
"""Most characters of a merged token: many times those of real tokens, and few enough to try all cuts."""


def write_tokenizer(metadata: GgufMetadata, target: Path) -> None:
    """Writes the tokenizer that the metadata describe into the directory ``target``.

    Two kinds are supported: "gpt2" is BPE over bytes, "llama" is SentencePiece's BPE over characters, with tokens for
    single bytes if a character is not in the vocabulary.

    Raises:
        ModelError: a field is missing or invalid; the kind or its pre-tokenizer is not supported.
        OSError: the directory cannot be written.
    """
    kind, pre = metadata.text("tokenizer.ggml.model", "none"), metadata.text("tokenizer.ggml.pre", "default")
    tokens, types = metadata.vocabulary, _token_types(metadata)
    if kind == "gpt2" and pre in _BYTE_LEVEL_PRE:
        tokenizer = _byte_level(metadata, pre)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, types)
    else:
        raise ModelError(
            f"{metadata.source}: tokenizer {shown(kind)} with pre-tokenizer {shown(pre)} is not supported in GGUF "
            f"(supported: 'llama', and 'gpt2' with {', '.join(_BYTE_LEVEL_PRE)}); use the model's safetensors directory"
        )
    _add_tokens(tokenizer, tokens, types)
    # Defaults without the field: SentencePiece's models begin with the token, those over bytes do not.
    bos = metadata.token_id("bos_token_id")
    if metadata.fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and bos is not None:
        _prepend_bos(tokenizer, metadata, tokens[bos])
    # Not tokenizer.save, whose error for a full disk is a bare Exception.
    (target / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    special = {
        f"{name}_token": tokens[token]
        for name in ("bos", "eos")
        if (token := metadata.token_id(f"{name}_token_id")) is not None
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if template := metadata.text("tokenizer.chat_template", ""):
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (target / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _token_types(metadata: GgufMetadata) -> list[int]:
    return _of_each_token(metadata, "tokenizer.ggml.token_type", int)


def _of_each_token(metadata: GgufMetadata, key: str, kind: type) -> list[Any]:
    """A list with a number for each token. Raises ModelError if it is invalid."""
    values: Any = metadata.fields.get(key)
    count = len(metadata.vocabulary)
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or any(type(value) is not kind for value in values) or any(map(math.isnan, values)):
        raise metadata.error(key, f"a list of {count} numbers, one for each token")
    return list(values)


def _add_tokens(tokenizer: Any, tokens: list[str], types: list[int]) -> None:
    """Adds tokens that match before text is split."""
    from tokenizers import AddedToken

    def of(wanted: int, special: bool) -> list[Any]:
        pairs = zip(tokens, types, strict=True)
        return [AddedToken(token, special=special, normalized=False) for token, kind in pairs if kind == wanted]

    tokenizer.add_special_tokens(of(_CONTROL_TOKEN, special=True))
    tokenizer.add_tokens(of(_USER_TOKEN, special=False))


def _byte_level(metadata: GgufMetadata, pre: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitters: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_PATTERN), "isolated"), byte_level],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), "isolated"), byte_level],
    }
    vocab = {token: index for index, token in enumerate(metadata.vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(metadata, vocab), ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(metadata: GgufMetadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens. Raises ModelError if one is not, as the tokenizers library would panic."""
    key = "tokenizer.ggml.merges"
    merges = metadata.fields.get(key)
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise metadata.error(key, "a list of strings")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not left or not right or any(part not in vocab for part in (left, right, left + right)):
            raise ModelError(
                f"{metadata.source}: metadata {key} has {shown(merge)}, expected two tokens that make a third"
            )
        pairs.append((left, right))
    return pairs


def _sentencepiece(metadata: GgufMetadata, types: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata.vocabulary
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.token_id("unknown_token_id")
    scores = _of_each_token(metadata, "tokenizer.ggml.scores", float)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, scores, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    parts: list[Any] = [normalizers.Replace(" ", _SPACE)]
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.fields.get("tokenizer.ggml.add_space_prefix", True):
        parts.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(parts)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(vocab: Mapping[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Converts SentencePiece's scores of merged tokens to an order of pairs.

    Every way to cut a token into two tokens is a pair; all pairs of one token have its score. Only ordinary tokens are
    cut: text must not merge into a control token.
    """
    ranked = []
    for token, index in vocab.items():
        if types[index] != _ORDINARY_TOKEN or len(token) > _MAX_CUT:
            continue
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        ranked += [(-scores[index], index, vocab[left], vocab[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _prepend_bos(tokenizer: Any, metadata: GgufMetadata, bos: str) -> None:
    from tokenizers import processors

    try:
        template = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))])
    except ValueError as error:
        raise metadata.error(
            "tokenizer.ggml.bos_token_id", f"a token that a text can begin with, not {shown(bos)}"
        ) from error
    tokenizer.post_processor = template
