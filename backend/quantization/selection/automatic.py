"""Finds the fastest quantisation here, measured on a few layers of the model."""

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
"""Least gain over the first candidate; a smaller one is within the noise of measurement."""

RunnerFactory = Callable[[Quantization, ModelConfig, ModelWeights], ModelRunner]
"""(quantisation, config, weights) to the runner that would serve."""


def fastest(
    config: ModelConfig,
    weights: ModelWeights,
    candidates: Sequence[Quantization],
    batches: Sequence[int],
    create_runner: RunnerFactory,
) -> tuple[Quantization, dict[Quantization, float]]:
    """The candidate with the fastest decode steps, or the first if no other gains enough; and the time of each.

    Args:
        candidates: names of quantisations; the first is the baseline.
        batches: batch sizes. A candidate's time is the mean over them of its step time relative to the baseline's, so
            that all batch sizes count equally.
        create_runner: a candidate whose runner cannot be made is skipped, except the baseline.

    Returns:
        A name, and by name the step time relative to the baseline's.

    Raises:
        ModelError: the baseline's runner cannot be made.
    """
    layers = config.num_layers
    few = _time_interleaved(config, weights, min(_LAYERS, layers), candidates, batches, create_runner)
    more = _time_interleaved(config, weights, min(2 * _LAYERS, layers), list(few), batches, create_runner)
    whole = {
        name: [_scaled_to_all_layers(some, other, layers) for some, other in zip(few[name], more[name], strict=True)]
        for name in more
    }
    first = whole[candidates[0]]
    shares = {
        name: statistics.fmean(mine / its for mine, its in zip(seconds, first, strict=True))
        for name, seconds in whole.items()
    }
    name = min(shares, key=lambda name: shares[name])
    return name if shares[name] <= 1 - _MIN_GAIN else candidates[0], shares


def _scaled_to_all_layers(some: float, other: float, layers: int) -> float:
    """Seconds for all layers and the head, from those for ``_LAYERS`` and for twice as many."""
    return some + max(0.0, other - some) / _LAYERS * max(0, layers - _LAYERS)


def _time_interleaved(
    config: ModelConfig,
    weights: ModelWeights,
    layers: int,
    candidates: Sequence[Quantization],
    batches: Sequence[int],
    create_runner: RunnerFactory,
) -> dict[Quantization, list[float]]:
    """The shortest decode step of each candidate with ``layers`` layers, by batch, in seconds.

    Candidates take turns, so that other load affects all.
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
    """Times a decode step of a batch."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, batch).tolist()
    step = pack([SequenceRows([token], 0, [block]) for block, token in enumerate(tokens)], range(batch), [])
    began = time.perf_counter()
    runner.run(step)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
