"""The decoder layer of the calibration computes what the served layer computes, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from backend.checkpoints.tensor_store import TensorStore
from backend.model_loader.weights import dense, load_weights, read_config
from backend.quantization.calibration.decoder_layer import DecoderLayer, ExpertNames
from tests.backend.random_models import KINDS, random_tokens, relative_error, save

LENGTH = 70
"""Several windows long."""


@pytest.mark.parametrize("kind", KINDS)
def test_layers_one_after_the_other_give_transformers_logits(kind: str, tmp_path: Path) -> None:
    """The layers run one after the other give transformers' logits in float32, for two sequences at once."""
    reference = save(KINDS[kind], tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)
    names = ExpertNames.of(TensorStore(tmp_path))
    ids = torch.from_numpy(random_tokens(2 * LENGTH)).long().view(2, LENGTH)
    with torch.inference_mode():
        hidden = weights.embedding[ids].float() * config.embedding_scale
        for index, layer in enumerate(weights.layers):
            hidden = DecoderLayer(config, index, layer, names)(hidden)
        normed = functional.rms_norm(hidden, (config.hidden_size,), weights.norm.float(), config.rms_norm_eps)
        logits = functional.linear(normed, dense(weights.head).float())
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        assert relative_error(logits, reference(ids).logits) < 1e-5
