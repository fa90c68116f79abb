"""Compares a runner with the torch reference before it serves: on this machine, with the model's own weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, StepInput, pack
from backend.model_loader.linears import as_floats
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.runners.torch.exchange import Exchange, NoExchange
from backend.runners.torch.runner import TorchRunner

RunnerMaker = Callable[[ModelConfig, ModelWeights, int, int], ModelRunner]
"""(config, weights, number of blocks, longest context) to a runner."""

_LAYERS = 2
_VOCABULARY = 4096
_BLOCKS = 8
_CONTEXT = 4 * BLOCK_SIZE


def max_relative_error(
    config: ModelConfig,
    weights: ModelWeights,
    make_runner: RunnerMaker,
    exchange: Exchange = NoExchange(),  # noqa: B008 - has no state
) -> float:
    """Largest relative error of logits and hidden states of a short mixed batch, against the float32 reference.

    The reference uses the dequantised weights: the test checks the runner, not the loss of quantisation.

    The first layers and tokens of the real weights are enough to catch a wrong kernel, layout or build, and take a
    fraction of a second. The steps cover a prefill that crosses a block's border, its second chunk, and a batch of
    a decode and a prefill, on blocks that are not in order.

    Args:
        exchange: of the reference, where ``weights`` are a part of a model.
    """
    head = weights.head
    # A quantised head cannot be cut.
    vocabulary = min(_VOCABULARY, config.vocab_size) if isinstance(head, torch.Tensor) else config.vocab_size
    small_config = dataclasses.replace(config, num_layers=min(_LAYERS, config.num_layers), vocab_size=vocabulary)
    small_weights = dataclasses.replace(
        weights,
        embedding=weights.embedding[:vocabulary],
        layers=weights.layers[:_LAYERS],
        head=head[:vocabulary] if isinstance(head, torch.Tensor) else head,
    )
    runner = make_runner(small_config, small_weights, _BLOCKS, _CONTEXT)
    reference = TorchRunner(small_config, as_floats(small_weights), _BLOCKS, _CONTEXT, exchange=exchange)
    worst = 0.0
    for step in steps(vocabulary):
        got, expected = runner.run(step), reference.run(step)
        for ours, theirs in ((got.logits, expected.logits), (got.hidden, expected.hidden)):
            error = float((ours.to(theirs.device) - theirs).norm() / theirs.norm())
            worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst


def steps(vocabulary: int) -> list[StepInput]:
    """The steps that are compared, with tokens below ``vocabulary`` and logits and hidden states of all rows."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, 64).tolist()
    first, second = [5, 2, 7], [1, 4]
    return [
        _step(tokens, [(first, 0, BLOCK_SIZE + 3)]),
        _step(tokens, [(first, BLOCK_SIZE + 3, 6)]),
        _step(tokens, [(first, BLOCK_SIZE + 9, 1), (second, 0, BLOCK_SIZE + 1)]),
        _step(tokens, [(first, BLOCK_SIZE + 10, 1), (second, BLOCK_SIZE + 1, 1)]),
    ]


def _step(tokens: list[int], chunks: list[tuple[list[int], int, int]]) -> StepInput:
    """A step of some (blocks, start, count), with logits and hidden states of all rows."""
    sequences = [SequenceRows(tokens[:count], start, blocks) for blocks, start, count in chunks]
    rows = range(sum(count for _, _, count in chunks))
    return pack(sequences, rows, rows)
