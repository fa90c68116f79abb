"""Rotary position embedding (RoFormer, arXiv 2104.09864), shared by every runner so that they agree."""

from __future__ import annotations

import math

import torch

from backend.config import ModelConfig


def rope_table(config: ModelConfig, positions: int) -> torch.Tensor:
    """Cosines and sines of every position: float32 [positions, head_dim], cosines in the first half of a row.

    Element i of a head is rotated together with element i + head_dim/2 ("rotate half").
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (half / config.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _scaled(config, frequencies))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).contiguous()


def _scaled(config: ModelConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: wavelengths beyond the trained context are stretched, short ones kept, between them a blend."""
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
