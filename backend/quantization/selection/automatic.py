"""Which quantisation is fastest here, measured on a few layers of the model itself."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from backend.engine.model_runner import ModelRunner, SequenceRows, pack
from backend.errors import ModelError
from backend.model_loader.weights import ModelWeights
from backend.models.config import ModelConfig
from backend.quantized_weights.names import Quantization

_LAYERS = 2
_TURNS = 5
_MIN_GAIN = 0.05
"""What has to be gained over the first candidate: less is not told from what else the machine does."""

RunnerFactory = Callable[[Quantization, ModelConfig, ModelWeights], ModelRunner]
"""(quantisation, config, weights) to the runner that would serve."""


def fastest(
    config: ModelConfig,
    weights: ModelWeights,
    candidates: Sequence[Quantization],
    batches: Sequence[int],
    create_runner: RunnerFactory,
) -> tuple[Quantization, dict[Quantization, float]]:
    """The candidate whose decode steps are the fastest, or the first where no other gains much; and what each takes.

    Args:
        candidates: names of quantisations; the first is what the others are compared with.
        batches: sequences at a time. A candidate's time is the mean over them of its steps' share of the first's, so a
            large batch counts no more than a small one.
        create_runner: one that cannot be made is not chosen, but the first has to be.

    Returns:
        A name, and by name the time for a step in shares of the first candidate's.

    Raises:
        ModelError: the first cannot be made.
    """
    layers = config.num_layers
    few = _in_turn(config, weights, min(_LAYERS, layers), candidates, batches, create_runner)
    more = _in_turn(config, weights, min(2 * _LAYERS, layers), list(few), batches, create_runner)
    whole = {
        name: [_of_all(some, other, layers) for some, other in zip(few[name], more[name], strict=True)] for name in more
    }
    first = whole[candidates[0]]
    shares = {
        name: statistics.fmean(mine / its for mine, its in zip(seconds, first, strict=True))
        for name, seconds in whole.items()
    }
    name = min(shares, key=lambda name: shares[name])
    return name if shares[name] <= 1 - _MIN_GAIN else candidates[0], shares


def _of_all(some: float, other: float, layers: int) -> float:
    """Seconds for all layers and the head, from those for ``_LAYERS`` and for twice as many."""
    return some + max(0.0, other - some) / _LAYERS * max(0, layers - _LAYERS)


def _in_turn(
    config: ModelConfig,
    weights: ModelWeights,
    layers: int,
    candidates: Sequence[Quantization],
    batches: Sequence[int],
    create_runner: RunnerFactory,
) -> dict[Quantization, list[float]]:
    """The shortest decode step of each candidate with so many layers, by batch, in seconds.

    By turns, so that what else the machine does is the same for all.
    """
    cut = dataclasses.replace(config, num_layers=layers)
    its = dataclasses.replace(weights, layers=weights.layers[:layers])
    runners: dict[Quantization, ModelRunner] = {}
    for name in candidates:
        try:
            runners[name] = create_runner(name, cut, its)
        except ModelError:
            if name == candidates[0]:
                raise
    taken = {name: [math.inf] * len(batches) for name in runners}
    for turn in range(_TURNS + 1):
        for name, runner in runners.items():
            for place, batch in enumerate(batches):
                seconds = _seconds(runner, batch, config.vocab_size)
                if turn:  # the first one warms up
                    taken[name][place] = min(taken[name][place], seconds)
    return taken


def _seconds(runner: ModelRunner, batch: int, vocabulary: int) -> float:
    """What a decode step of a batch takes."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, batch).tolist()
    step = pack([SequenceRows([token], 0, [block]) for block, token in enumerate(tokens)], range(batch), [])
    began = time.perf_counter()
    runner.run(step)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
