"""Steps of a model on two ranks, each on a core, beside the same on one rank and one core, by turns in one run.

The model has random weights, in the shape of six layers of TinyLlama 1.1B: what is exchanged grows with the hidden
size and what is computed with its square, so the result for a small model is another one. One process computes the
whole model and is rank 0 of the divided one, so both see the same machine; it stays on the first core, and the other
rank on the second. Steps alternate; a sample is the median of the ratios of the pairs of a round.

    python -m benchmarks.engine.parallel_program --division {tensor,pipeline} [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backend.engine.model_runner import ModelRunner, StepInput

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 6, 32, 4, 32000
CONTEXT = 128
BLOCKS_OF_EACH = 2 * CONTEXT // 16
STEPS = {
    "decode, batch 1": (1, 1),
    "decode, batch 8": (8, 1),
    "decode, batch 32": (32, 1),
    "prefill of 128 tokens": (1, 128),
    "prefill of 4 prompts of 64 tokens": (4, 64),
}
"""Sequences, and rows of each."""
PAIRS = 3
"""In a round."""


def main() -> None:
    """Measures and writes JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--division", choices=["tensor", "pipeline"], required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    first, second, *_ = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})  # before torch starts a thread
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as folder:
        report = compare(write_model(Path(folder)), arguments.division, arguments.rounds, second)
    print(json.dumps(report, indent=2))


def compare(directory: Path, division: str, rounds: int, other_core: int) -> list[dict[str, Any]]:
    """For each kind of step, the samples of all rounds: seconds of one rank, and the ratio to those of two."""
    import torch

    from backend.model import load_part
    from backend.model_loader.weights import load_weights, read_config
    from backend.models.partition import partition
    from backend.runners.parallel.runner import ParallelRunner
    from backend.runners.parallel.settings import ParallelSettings
    from backend.runners.torch.runner import TorchRunner

    config = read_config(directory).with_max_context(2 * CONTEXT)
    blocks = BLOCKS_OF_EACH * max(sequences for sequences, _ in STEPS.values())
    parts = partition(config, *((2, 1) if division == "tensor" else (1, 2)))
    settings = ParallelSettings(parts, "none", "float32", "auto", blocks, 2 * CONTEXT, threads=1)
    torch.set_num_threads(1)
    one = TorchRunner(config, load_weights(directory, config), blocks, 2 * CONTEXT)
    two = ParallelRunner(config, directory, settings, lambda part: load_part(directory, config, part, "none")[0])
    try:
        for task in Path(f"/proc/{two.ranks.pids[1]}/task").iterdir():
            os.sched_setaffinity(int(task.name), {other_core})
        return [
            {"what": what, **_alternate(one, two, sequences, rows, rounds)} for what, (sequences, rows) in STEPS.items()
        ]
    finally:
        two.close()


def _alternate(one: ModelRunner, two: ModelRunner, sequences: int, rows: int, rounds: int) -> dict[str, list[float]]:
    """Both runners take turns on the same step."""
    step = _step(sequences, rows)
    for runner in (one, two):
        runner.run(step)
    seconds: list[float] = []
    ratios: list[float] = []
    for _ in range(rounds):
        pairs = [(_seconds(one, step), _seconds(two, step)) for _ in range(PAIRS)]
        seconds.append(statistics.median(alone for alone, _ in pairs))
        ratios.append(statistics.median(alone / divided for alone, divided in pairs))
    return {"seconds": seconds, "ratios": ratios}


def _step(sequences: int, rows: int) -> StepInput:
    """Decodes at a context of ``CONTEXT`` tokens, or beginnings of prompts; logits of each last row are wanted."""
    from backend.engine.model_runner import SequenceRows, pack

    start = CONTEXT if rows == 1 else 0
    chunks = [
        SequenceRows(
            [(7 * row + 11 * own) % VOCABULARY for row in range(rows)],
            start,
            range(own * BLOCKS_OF_EACH, (own + 1) * BLOCKS_OF_EACH),
        )
        for own in range(sequences)
    ]
    return pack(chunks, range(rows - 1, sequences * rows, rows))


def _seconds(runner: ModelRunner, step: StepInput) -> float:
    began = time.perf_counter()
    runner.run(step)
    return time.perf_counter() - began


def write_model(directory: Path) -> Path:
    """Random weights in float32 and their config, in Hugging Face's form."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)

    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        tensors |= {f"{at}.{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")}
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


if __name__ == "__main__":
    main()
