"""Runs calibration windows through a layer, with a stop before each group of linear layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from backend.quantization.calibration.decoder_layer import DecoderLayer, Group
from backend.quantization.calibration.input_statistics import InputStatistics

InputStatisticsByGroup = dict[tuple[str, ...], InputStatistics]
"""Input statistics, by the names of the linear layers that share the input."""

_TOKENS = 4096
"""Tokens per batch: enough for fast products, few beside all windows."""


def stages(layer: DecoderLayer, hidden: torch.Tensor) -> Iterator[tuple[Group, InputStatisticsByGroup]]:
    """Runs windows through a layer; ``hidden`` float32 [windows, T, hidden] is overwritten with the output.

    After each yield the caller may change the group's weights; the next groups' statistics and the output are
    computed with them.

    Yields:
        A group and its layers' input statistics, of every expert in a mixture.
    """
    batches = torch.split(hidden, max(1, _TOKENS // hidden.shape[1]))  # views of it
    of_hidden = InputStatistics(hidden.shape[2])
    for batch in batches:
        of_hidden.add(layer.attention_input(batch).flatten(0, 1))
    yield "qkv", dict.fromkeys(layer.group("qkv"), of_hidden)

    mixed = [layer.attend(layer.attention_input(batch)) for batch in batches]
    of_mixed = InputStatistics(mixed[0].shape[2])
    for part in mixed:
        of_mixed.add(part.flatten(0, 1))
    yield "o", dict.fromkeys(layer.group("o"), of_mixed)

    for batch in batches:
        batch.copy_(layer.add_attention(batch, mixed.pop(0)))
    seen = {names: InputStatistics(hidden.shape[2]) for names in layer.group("gate_up")}
    for batch in batches:
        normed = layer.mlp_input(batch)
        for rows in layer.routed(normed):
            seen[rows.names.gate, rows.names.up].add(rows.of(normed))
    yield "gate_up", seen

    sizes = {names: layer.linears[names[0]].weight.shape[1] for names in layer.group("down")}
    seen = {names: InputStatistics(size) for names, size in sizes.items()}
    for batch in batches:
        normed = layer.mlp_input(batch)
        for rows in layer.routed(normed):
            seen[(rows.names.down,)].add(layer.activated(rows.names, rows.of(normed)))
    yield "down", seen

    for batch in batches:
        normed = layer.mlp_input(batch)
        batch.copy_(layer.add_mlp(batch, normed, layer.routed(normed)))
