"""Ranks with the kernels for devices compute what one device does; here the kernels are interpreted, and gloo connects.

What NCCL does among devices is tested in tests/gpu.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from backend.checkpoints.quantized.writer import write_checkpoint
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, pack
from backend.errors import EngineLost, ModelError
from backend.model import load_part
from backend.model_loader.linears import linears, map_linears
from backend.model_loader.weights import dense, load_weights
from backend.models.partition import partition
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import Scheme
from backend.runners.parallel.messages import RankJob
from backend.runners.parallel.parts import check_part
from backend.runners.parallel.settings import ParallelSettings
from tests.backend.random_models import KINDS, Kind, Paged, chunked, random_tokens, relative_error, save, step_of
from tests.backend.runners.parallel.ranks import (
    CONTEXT,
    INTERPRETED,
    MOST,
    Division,
    continued,
    many_ranks,
    model_config,
    one_device,
)


def small(name: str, **changes: object) -> Kind:
    """A kind with heads of a size that there are kernels for, and with sizes that divide unevenly."""
    sizes = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 307, "intermediate_size": 150}
    return Kind(KINDS[name].family, {**KINDS[name].changes, **sizes, **changes})


DIVISIONS = {
    "biases and an odd vocabulary": Division(small("llama"), 2, 1),
    "a tied head, and ranks with the same KV head": Division(small("qwen3", num_key_value_heads=1), 2, 1),
    "two stages of two ranks": Division(small("llama", num_hidden_layers=3), 2, 2),
    "a tied head and windows in two stages": Division(small("qwen3-windowed", num_hidden_layers=4), 1, 2),
}


def run_schedule(runner: ModelRunner) -> torch.Tensor:
    """Logits and states of every row of chunks and decodes, alone and mixed; the first step is divided among stages."""
    tokens = random_tokens(100)
    first, second = (Paged(tokens[own * 50 :], list(range(own * 8, own * 8 + 8))) for own in range(2))
    outputs = []
    for chunks in ([(first, 30), (second, 5)], [(first, 1), (second, 1)], [(first, 3), (second, 1)]):
        output = runner.run(step_of(chunks))
        outputs.append(torch.cat([output.logits, output.hidden], dim=1))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", DIVISIONS)
def test_logits_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    """Logits and hidden states are within 1e-4 of one device's in any schedule, and greedy answers are the same."""
    division = DIVISIONS[name]
    save(division.kind, tmp_path)
    one = one_device(tmp_path)
    with many_ranks(tmp_path, division.tensor, division.stages, devices=INTERPRETED) as many:
        expected, got = run_schedule(one), run_schedule(many)
        assert float(expected.abs().max()) > 1
        assert float((got - expected).abs().max()) < MOST
        prompt = random_tokens(9, seed=7)
        assert continued(many, prompt, 6) == continued(one, prompt, 6)


def test_a_draft_that_branches_is_seen_by_every_rank(tmp_path: Path) -> None:
    """Rows of a tree see what they see on one device, and keys and values that are moved are moved in every rank."""
    save(small("llama"), tmp_path)
    prompt = random_tokens(20).tolist()
    draft, parents = [7, 8, 9, 10], [-1, -1, 0, 1]

    def tried(runner: ModelRunner) -> torch.Tensor:
        blocks = [3, 5]
        runner.run(pack([SequenceRows(prompt, 0, blocks)], [19]))
        tree = runner.run(pack([SequenceRows([6, *draft], 20, blocks, parents=parents)], range(5))).logits.clone()
        # The second branch is kept: its tokens go to where they would be in a plain sequence.
        slots = [blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in (22, 24, 21, 22)]
        runner.move_kv([(slots[0], slots[2]), (slots[1], slots[3])])
        return torch.cat([tree, runner.run(pack([SequenceRows([11], 23, blocks)], [0])).logits])

    with many_ranks(tmp_path, 2, devices=INTERPRETED) as many:
        assert float((tried(many) - tried(one_device(tmp_path))).abs().max()) < MOST


def quantised_files(floats: Path, directory: Path, schemes: tuple[Scheme, ...]) -> None:
    """Writes a model like the one in ``floats``, each layer in one of the schemes."""
    (floats / "tokenizer.json").write_text("{}", encoding="utf-8")
    weights = linears(load_weights(floats, model_config(floats)))
    layers = {name: schemes[int(name.split(".")[2])].pack(dense(weight).float()) for name, weight in weights.items()}
    write_checkpoint(directory, floats, layers)


@pytest.mark.parametrize(
    ("schemes", "most"),
    [
        ((IntScheme(4, 32), Fp8Scheme("tensor")), 1e-5),
        ((Nf4Scheme(),), 1e-5),
        # Divided by outputs: a row's scale is of all inputs, and groups are as large as what both ranks have.
        ((IntScheme(8, activation_bits=8), IntScheme(4, 128)), 4e-3),
    ],
    ids=["by inputs", "nf4", "by outputs"],
)
def test_quantised_weights_are_divided(schemes: tuple[Scheme, ...], most: float, tmp_path: Path) -> None:
    """Quantised weights give the logits and greedy tokens of one device, up to rows that are rounded to the other
    side.
    """
    sizes = {"intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 101, "num_hidden_layers": len(schemes)}
    save(small("llama", **sizes), tmp_path / "floats")
    directory = tmp_path / "packed"
    quantised_files(tmp_path / "floats", directory, schemes)
    tokens = random_tokens(18) % 101
    one = one_device(directory)
    with many_ranks(directory, 2, devices=INTERPRETED) as many:
        expected, got = chunked(one, tokens, 17, 1), chunked(many, tokens, 17, 1)
        assert relative_error(got, expected) < most
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_kernels_are_tested_on_each_part(tmp_path: Path) -> None:
    """Parts of any stage pass their self-test alone, and one that the kernels cannot compute is refused."""
    save(small("llama", num_hidden_layers=3, intermediate_size=128), tmp_path)
    config = model_config(tmp_path)
    parts = partition(config, 2, 2)
    settings = ParallelSettings(parts, "none", "float32", "auto", 8, CONTEXT, 1, devices=INTERPRETED)
    for part in parts[1:3]:
        weights, _ = load_part(tmp_path, config, part, "none")
        job = RankJob(tmp_path, config, part, settings, tmp_path, None)
        check_part(job, weights)
    beyond = map_linears(weights, lambda name, weight: IntScheme(4, 8).pack(dense(weight)))
    message = r"^ranks cannot compute on devices: .*groups of 8 inputs.*; expected --device cpu$"
    with pytest.raises(ModelError, match=message):
        check_part(job, beyond)


def test_a_killed_rank_ends_the_engine(tmp_path: Path) -> None:
    """The next step raises an error that names the rank."""
    save(small("llama"), tmp_path)
    with many_ranks(tmp_path, 2, devices=INTERPRETED) as many:
        os.kill(many.ranks.pids[1], signal.SIGKILL)
        with pytest.raises(EngineLost, match=r"^rank 1 \(part 2 of 2\) was killed by SIGKILL$"):
            many.run(step_of([(Paged(random_tokens(20), [0, 1]), 20)]))
    assert many.ranks.failure is not None
