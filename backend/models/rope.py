"""Rotary position embedding (RoFormer, arXiv 2104.09864), shared by every runner so that they agree."""

from __future__ import annotations

import math

import torch

from backend.models.config import LinearRopeScaling, ModelConfig, Rope, RopeScaling


def rope_table(config: ModelConfig, positions: int) -> torch.Tensor:
    """Cosines and sines of the model's main rotary embedding; see ``rotations``."""
    return rotations(Rope(config.rope_theta, config.rope_scaling), config.head_dim, positions)


def rotations(rope: Rope, head_dim: int, positions: int) -> torch.Tensor:
    """Cosines and sines of every position: float32 [positions, head_dim], cosines in the first half of a row.

    Element i of a head is rotated together with element i + head_dim/2 ("rotate half").
    """
    half = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies = scaled_frequencies(rope.scaling, 1.0 / rope.theta ** (half / head_dim))
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).contiguous()


def scaled_frequencies(scaling: RopeScaling | None, frequencies: torch.Tensor) -> torch.Tensor:
    """Frequencies [head_dim / 2] as a model scaled them for longer contexts than it was first trained on.

    Llama 3.1: wavelengths beyond the trained context are stretched, short ones kept, between them a blend.
    """
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
