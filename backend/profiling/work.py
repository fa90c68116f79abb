"""What a step has to do at least: bytes that it reads and writes, and operations, from the shape of the model.

Weights are read once a step, however many rows share the reading; of experts those that some row chooses. Keys and
values are read once by each sequence, up to its last position, and written once. An operation is a multiplication or
an addition. Activations, which stay in caches, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.models.config import ModelConfig
from backend.models.sizes import count_parameters
from backend.profiling.instrumentation import StepRecord


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and operations of a step."""

    weight_bytes: float
    kv_bytes: float
    flops: float

    @property
    def bytes(self) -> float:
        """All that is moved."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes


class ModelWork:
    """The work of one model's steps.

    Args:
        read_bytes: of all weights that products read: the matrices and the head, experts included.
        kv_bytes_per_token: over all layers.
    """

    def __init__(self, config: ModelConfig, read_bytes: int, kv_bytes_per_token: int) -> None:
        self._config = config
        self._read_bytes = read_bytes
        self._kv_bytes_per_token = kv_bytes_per_token
        parameters = count_parameters(config)
        self._head = parameters.embedding
        self._all = parameters.layers
        self._one_expert = [
            0
            if (experts := config.layer_experts(layer)) is None
            else 3 * config.hidden_size * experts.intermediate_size
            for layer in range(config.num_layers)
        ]
        idle = 0
        for layer, size in enumerate(self._one_expert):
            if (experts := config.layer_experts(layer)) is not None:
                idle += size * (experts.count - experts.per_token)
        self._for_each_row = self._all - idle

    @property
    def flops_per_token(self) -> int:
        """Of a token without logits, and without attention."""
        return 2 * self._for_each_row

    def of(self, step: StepRecord) -> Work:
        """The work of a step."""
        config = self._config
        seen = read = 0
        for layer in range(config.num_layers):
            window = config.window(layer)
            for first, count in step.chunks:
                seen += _positions_seen(first, count, window)
                end = first + count
                read += end if window is None else min(end, window + count - 1)
        attention = 4 * config.num_heads * config.head_dim * seen
        products = self.flops_per_token * step.rows + 2 * self._head * step.logits_rows
        kv_bytes = self._kv_bytes_per_token * (read / config.num_layers + step.rows)
        return Work(self._weights_of(step.rows), kv_bytes, products + attention)

    def _weights_of(self, rows: int) -> float:
        """Bytes of the weights that so many rows read; experts are taken to be chosen independently."""
        unread = 0.0
        for layer, size in enumerate(self._one_expert):
            if (experts := self._config.layer_experts(layer)) is not None:
                unread += size * experts.count * (1 - experts.per_token / experts.count) ** rows
        return self._read_bytes * (1 - unread / (self._all + self._head))


def _positions_seen(first: int, count: int, window: int | None) -> int:
    """Tokens that ``count`` rows from position ``first`` on attend to, summed over the rows."""
    if window is None:
        return count * first + count * (count + 1) // 2
    return sum(min(position + 1, window) for position in range(first, first + count))
