"""A GGUF file of any supported family becomes the model that was written to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import Tokenizer

from backend.checkpoints.gguf import convert as gguf_file
from backend.checkpoints.gguf.blocks import blocks_linear
from backend.checkpoints.gguf.config import GgufMetadata
from backend.checkpoints.gguf.convert import convert_gguf
from backend.checkpoints.gguf.tokenizer import write_tokenizer
from backend.errors import ModelError
from backend.model_loader.weights import load_weights, read_config
from backend.models.config import Llama3RopeScaling
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.runners.torch.runner import TorchRunner
from backend.text.detokenizer import Detokenizer, TokenBytes
from tests.backend.checkpoints.gguf.gguf_models import SENTENCEPIECE, write_model
from tests.backend.conftest import quiet
from tests.backend.random_models import (
    KINDS,
    LLAMA3_SCALING,
    VOCABULARY,
    Kind,
    Paged,
    random_tokens,
    relative_error,
    step_of,
)

LLAMA3 = Kind(
    "Llama",
    {"rope_parameters": {**LLAMA3_SCALING, "original_max_position_embeddings": 8192}, "max_position_embeddings": 16384},
)
# What GGUF cannot say is as the released models have it: how far attention is scaled, and which base windows have.
GEMMA2 = Kind("Gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0})
GEMMA3 = Kind("Gemma3Text", {"sliding_window": 24, "query_pre_attn_scalar": 32, "num_hidden_layers": 7})
SMOLLM3 = Kind("SmolLM3", {"num_hidden_layers": 5})
WRITTEN = {
    "llama-biases": Kind("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-biases": Kind("Llama", {"attention_bias": True}),
    "smollm3-biases": Kind("SmolLM3", {"num_hidden_layers": 5, "attention_bias": True}),
    "llama-linear": KINDS["llama-linear"],
    "llama-3.1": LLAMA3,
    "mixtral": KINDS["mixtral"],
    "qwen2": KINDS["qwen2"],
    "qwen3": KINDS["qwen3"],
    "qwen3-moe": KINDS["qwen3-moe"],
    "smollm3": SMOLLM3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_converted_file_gives_the_same_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted file gives transformers' logits, in several files if it is large."""
    # The size of a file is no option, and many gigabytes.
    monkeypatch.setattr(gguf_file, "_SHARD_BYTES", 2**18)
    reference = write_model(WRITTEN[name], tmp_path / "model.gguf")
    (tmp_path / "converted").mkdir()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "converted", quiet)
    config = read_config(tmp_path / "converted")
    assert config.tie_word_embeddings == reference.config.tie_word_embeddings
    assert len(list((tmp_path / "converted").glob("*.safetensors"))) > 1
    tokens = random_tokens(83)
    with torch.inference_mode():
        expected = reference(torch.from_numpy(tokens).long()[None]).logits[0]
    runner = TorchRunner(config, load_weights(tmp_path / "converted", config), num_blocks=6, max_context=96)
    assert relative_error(runner.run(step_of([(Paged(tokens, [4, 2, 0, 5, 1, 3]), 83)])).logits, expected) < 1e-4


def in_blocks(kind: Kind) -> Kind:
    """A kind of model whose rows are whole blocks of 32."""
    return Kind(kind.family, {**kind.changes, "intermediate_size": 160})


@pytest.mark.parametrize("name", ["llama-linear", "mixtral", "gemma2"])
@pytest.mark.parametrize("blocks", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
def test_packed_blocks_equal_their_expansion(name: str, blocks: GGMLQuantizationType, tmp_path: Path) -> None:
    """With `packed` linear layers stay in integers, and equal the expanded weights bit for bit."""
    write_model(in_blocks(WRITTEN[name]), tmp_path / "model.gguf", blocks)
    weights = []
    for packed in (False, True):
        directory = tmp_path / f"{packed}"
        directory.mkdir()
        convert_gguf(tmp_path / "model.gguf", directory, quiet, packed=packed)
        weights.append(load_weights(directory, read_config(directory)))
    for expanded, kept in zip(weights[0].layers, weights[1].layers, strict=True):
        for part in ("query", "key", "value", "output", "gate", "up", "down"):
            weight = getattr(kept, part).weight
            assert isinstance(weight, IntLinear)
            assert weight.scheme.group_size == 32
            torch.testing.assert_close(weight.unpack(), getattr(expanded, part).weight, rtol=0, atol=0)
    assert torch.equal(weights[0].embedding, weights[1].embedding)


def test_q4_k_blocks_stay_packed(tmp_path: Path) -> None:
    """Q4_K blocks stay packed, and equal the gguf package's values up to rounding scales to half floats."""
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (6, 2, 144), dtype=np.uint8)
    blocks[:, :, :4] = generator.uniform(1e-3, 2e-3, (6, 2, 2)).astype(np.float16).view(np.uint8)
    expected = dequantize(blocks.reshape(6, -1), GGMLQuantizationType.Q4_K)
    linear = blocks_linear("Q4_K", blocks.reshape(6, -1))
    assert (linear.scheme, linear.shape) == (IntScheme(4, 32, "minimum"), (6, 512))
    assert linear.minima is not None
    codes = linear.plain_codes().numpy()
    scales, minima = (part.float().numpy().repeat(32, axis=1) for part in (linear.scales, linear.minima))
    allowed = 2.0**-11 * (scales * codes + np.abs(minima)) + 1e-7
    assert (np.abs(linear.unpack().numpy() - expected) <= allowed).all()


def test_blocks_that_no_scheme_holds_are_expanded(tmp_path: Path) -> None:
    """Blocks without a scheme, such as Q5_0, are expanded, and the config says nothing of quantisation."""
    write_model(in_blocks(WRITTEN["qwen3"]), tmp_path / "model.gguf", GGMLQuantizationType.Q5_0)
    convert_gguf(tmp_path / "model.gguf", tmp_path, quiet, packed=True)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    weights = load_weights(tmp_path, read_config(tmp_path))
    assert isinstance(weights.layers[0].query.weight, torch.Tensor)


def test_scaled_frequencies_are_recognised(tmp_path: Path) -> None:
    """Llama 3.1's rope scaling is recovered from its frequency divisors, and other divisors are refused."""
    write_model(LLAMA3, tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path, quiet)
    config = read_config(tmp_path)
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
    assert config.eos_token_ids == (257, 258)  # the ends of a text and of a turn
    write_model(KINDS["llama-3.1"], tmp_path / "odd.gguf")  # trained on 64 positions, unlike any that was released
    with pytest.raises(ModelError, match=r"odd\.gguf: tensor rope_freqs\.weight does not scale"):
        convert_gguf(tmp_path / "odd.gguf", tmp_path, quiet)


def test_large_gemmas_scale_attention_by_the_hidden_size(tmp_path: Path) -> None:
    """A Gemma 2 with the layer count of the 27B model scales attention by the hidden size."""
    write_model(Kind("Gemma2", {"num_hidden_layers": 46, "hidden_size": 64, "head_dim": 32}), tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path, quiet)
    assert read_config(tmp_path).attention_scale == (64 / 4) ** -0.5


@pytest.mark.parametrize("add_space_prefix", [False, True])
def test_sentencepiece_vocabularies_are_converted(tmp_path: Path, add_space_prefix: bool) -> None:
    """SentencePiece scores give the order of merges, other characters become bytes, and no merge is a control token."""
    changed = SENTENCEPIECE | {"add_space_prefix": add_space_prefix}
    fields = {f"tokenizer.ggml.{name}": value for name, value in changed.items()}
    write_tokenizer(GgufMetadata({"general.architecture": "llama", **fields}, (), "model.gguf"), tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(text)
    encoded = tokenizer.encode("abc é", add_special_tokens=False)
    assert encoded.tokens == (["▁ab", "c"] if add_space_prefix else ["abc"]) + ["▁", "<0xC3>", "<0xA9>"]
    assert Detokenizer(TokenBytes(text, VOCABULARY)).decode(encoded.ids) == "abc é"
    assert tokenizer.encode("a").tokens[0] == "<s>"
    merges = [tuple(merge) for merge in json.loads(text)["model"]["merges"]]
    assert ("s", ">") in merges
    assert ("<", "s>") not in merges
