"""Every family of decoder computes transformers' logits, however its tokens are spread over steps and blocks."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backend.engine.config import EngineConfig
from backend.model_loader.source import ModelSource
from backend.model_loader.weights import ModelWeights, load_weights, read_config
from backend.models.config import ModelConfig
from backend.runners.choice import choose_runner
from backend.runners.errors import RunnerUnavailable
from backend.runners.fused.runner import FusedRunner, check_shape
from backend.runners.torch import runner as torch_runner
from backend.runners.torch.runner import TorchRunner
from tests.backend.conftest import built_library
from tests.backend.random_models import (
    KINDS,
    WINDOW,
    Kind,
    Paged,
    chunked,
    of_vectors,
    random_tokens,
    relative_error,
    save,
    step_of,
)

LENGTHS = (83, 70, 30)
"""The first two are several windows long, the last is about one."""


LIKE_LLAMA = {"llama", "llama-3.1", "llama-linear", "mistral-unlimited", "qwen2", "qwen3", "smollm2"}
FUSED = {
    **{name: of_vectors(KINDS[name]) for name in sorted(LIKE_LLAMA)},
    "heads without groups": of_vectors(KINDS["llama"], num_key_value_heads=6),
    "one group of heads": of_vectors(KINDS["qwen2"], num_key_value_heads=1),
    "heads of 128": of_vectors(KINDS["qwen3"], num_attention_heads=4, head_dim=128),
}
"""What the fused step computes: each kind like Llama, and the shapes of attention."""


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, TorchRunner]:
    """transformers' model, and ours as loaded from the files that transformers wrote."""
    reference = save(KINDS[request.param], tmp_path)
    config = read_config(tmp_path)
    return reference, TorchRunner(config, load_weights(tmp_path, config), num_blocks=24, max_context=128)


def shuffled_sequences() -> list[Paged]:
    """Sequences of ``LENGTHS`` whose blocks lie anywhere."""
    blocks = np.random.default_rng(5).permutation(24).tolist()
    return [Paged(random_tokens(length, seed), blocks[6 * seed : 6 * seed + 6]) for seed, length in enumerate(LENGTHS)]


def test_logits_and_states_agree_with_transformers(pair: tuple[Any, TorchRunner]) -> None:
    """Logits and hidden states match transformers within 1e-4 over prefill, chunks beside decodes, and decodes."""
    reference, runner = pair
    sequences = shuffled_sequences()
    first, second, third = sequences
    logits: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    states: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    schedule = [
        [(first, 60)],  # whole prompt, longer than the window
        [(second, 17), (first, 1)],
        [(second, 33), (third, 5), (first, 1)],
        [(first, 2), (second, 1), (third, 19)],
        *[[(first, 1), (second, 1), (third, 1)]] * 6,  # decodes of sequences of three lengths
        [(first, 13), (second, 13)],
    ]
    for chunks in schedule:
        step = step_of(chunks)
        output = runner.run(step)
        counts = [count for _, count in chunks]
        for (sequence, _), rows, hidden in zip(
            chunks, torch.split(output.logits, counts), torch.split(output.hidden, counts), strict=True
        ):
            logits[id(sequence)].append(rows.clone())
            states[id(sequence)].append(hidden.clone())
    for sequence in sequences:
        assert sequence.computed == len(sequence.tokens)
        with torch.inference_mode():
            expected = reference(torch.from_numpy(sequence.tokens).long()[None], output_hidden_states=True)
        assert relative_error(torch.cat(logits[id(sequence)]), expected.logits[0]) < 1e-4
        assert relative_error(torch.cat(states[id(sequence)]), expected.hidden_states[-1][0]) < 1e-4


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_step_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """The fused step matches transformers within 5e-3, and gives the same bits in chunks."""
    reference = save(FUSED[name], tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)
    tokens = random_tokens(90)
    with torch.inference_mode():
        expected = reference(torch.from_numpy(tokens).long()[None]).logits[0]
    plain = TorchRunner(config, weights, num_blocks=8, max_context=128)
    assert relative_error(chunked(plain, tokens, 17, 1, 40, 32), expected) < 1e-4
    fused = FusedRunner(built_library(), config, weights, num_blocks=8, max_context=128, threads=2)
    whole = chunked(fused, tokens, 90)
    assert relative_error(whole, expected) < 5e-3
    assert torch.equal(chunked(fused, tokens, 17, 1, 40, 32), whole)


def test_the_real_model_agrees_with_transformers(
    source: ModelSource, config: ModelConfig, weights: ModelWeights
) -> None:
    """SmolLM2 matches transformers: the reference within 1e-4, the fused step within a KL divergence of 0.001 nats."""
    text = (
        "The sea is old. In 1492 three ships crossed it; later, engineers measured its currents with great care. "
        "def area(r): return 3.14159 * r ** 2\nPoets wrote of salt, and children asked why the water is blue."
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.directory)
    tokens = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32)
    reference.eval()
    with torch.inference_mode():
        expected = reference(torch.from_numpy(tokens).long()[None]).logits[0]
    plain = TorchRunner(config, weights, num_blocks=8, max_context=128)
    assert relative_error(chunked(plain, tokens, len(tokens)), expected) < 1e-4
    fused = FusedRunner(built_library(), config, weights, num_blocks=8, max_context=128, threads=2)
    served = chunked(fused, tokens, len(tokens))
    wanted, got = expected.log_softmax(-1), served.log_softmax(-1)
    assert float((wanted.exp() * (wanted - got)).sum(-1).mean()) < 1e-3
    assert float((served.argmax(-1) == expected.argmax(-1)).float().mean()) >= 0.99


def test_an_expert_computes_its_rows_in_one_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert computes all rows that chose it in one product, and none if no row chose it."""
    save(KINDS["mixtral"], tmp_path)
    config = read_config(tmp_path)
    runner = TorchRunner(config, load_weights(tmp_path, config), num_blocks=8, max_context=128)
    # How rows are batched shows in no output, so the private MLP's calls are counted.
    calls: list[int] = []
    product = torch_runner._Mlp.__call__

    def counted(mlp: torch_runner._Mlp, rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return product(mlp, rows)

    monkeypatch.setattr(torch_runner._Mlp, "__call__", counted)
    chunked(runner, random_tokens(90), 90)
    experts = config.experts
    assert experts is not None
    assert len(calls) <= config.num_layers * experts.count
    assert sum(calls) == config.num_layers * experts.per_token * 90
    calls.clear()
    chunked(runner, random_tokens(1), 1)
    assert calls == [1] * config.num_layers * experts.per_token


@pytest.mark.parametrize("name", KINDS)
def test_the_fused_step_refuses_models_unlike_llama(name: str, tmp_path: Path) -> None:
    """The fused step takes models like Llama and refuses others with the reason before anything is built."""
    KINDS[name].config().save_pretrained(tmp_path)
    config = dataclasses.replace(read_config(tmp_path), hidden_size=64, head_dim=64)
    if name in LIKE_LLAMA:
        check_shape(config)
    else:
        with pytest.raises(RunnerUnavailable, match=r"does not support .*(sliding|rotary|softcapped|mixture)"):
            check_shape(config)


def test_a_windowed_model_is_served_by_torch_past_its_window(tmp_path: Path) -> None:
    """The fused step serves a windowed model up to its window; for longer contexts torch does, with the reason."""
    save(Kind("Mistral", {"sliding_window": WINDOW, "head_dim": 64}), tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)
    built_library()
    engine = EngineConfig(kv_memory=2**20, threads=1)
    completion: list[str] = []
    assert isinstance(choose_runner(config, weights, engine, WINDOW, completion.append), FusedRunner)
    assert isinstance(choose_runner(config, weights, engine, WINDOW + 1, completion.append), TorchRunner)
    assert "sliding-window attention" in completion[-1]


def test_the_text_part_of_a_multimodal_model_is_served(tmp_path: Path) -> None:
    """The text decoder of a multimodal checkpoint is found under the tensor names of both transformers generations."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    parts: dict[str, Any] = {
        "text_config": KINDS["gemma3"].config().to_dict(),
        "vision_config": {**vision, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    }
    torch.manual_seed(4)
    reference: Any = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**parts))
    reference.float().eval()
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(60)
    with torch.inference_mode():
        expected = reference(torch.from_numpy(tokens).long()[None]).logits[0]
    weights = load_file(tmp_path / "model.safetensors")
    for name in list(weights):  # the names before transformers 5, or after it
        place, _, rest = name.partition("language_model.")
        if rest:
            other = f"language_model.model.{rest}" if place else f"model.language_model.{rest.removeprefix('model.')}"
            weights[other] = weights.pop(name)
    moved = tmp_path / "moved"
    moved.mkdir()
    save_file(weights, moved / "model.safetensors")
    shutil.copy(tmp_path / "config.json", moved)
    for directory in (tmp_path, moved):
        served = read_config(directory)
        runner = TorchRunner(served, load_weights(directory, served), num_blocks=4, max_context=64)
        output = runner.run(step_of([(Paged(tokens, [0, 2, 1, 3]), 60)]))
        assert relative_error(output.logits, expected) < 1e-4
