"""The real model answers a question rightly in every format that the fused step serves."""

from __future__ import annotations

import dataclasses

import pytest

from backend.engine.config import EngineConfig
from backend.model import load_model
from backend.model_loader.source import ModelSource
from backend.runners.fused.layout import Kernels
from tests.backend.conftest import CHAT, ENGINE, StartServer, built_library, quiet

FORMATS = {
    "float16": ENGINE,
    "bfloat16": dataclasses.replace(ENGINE, dtype="bfloat16"),
    "int8": dataclasses.replace(ENGINE, quantization="int8"),
    "int4": dataclasses.replace(ENGINE, quantization="int4"),
    "fp8": dataclasses.replace(ENGINE, quantization="fp8"),
    "nf4": dataclasses.replace(ENGINE, quantization="nf4"),
}


@pytest.mark.parametrize(("stored_as", "engine"), FORMATS.items(), ids=FORMATS)
async def test_the_capital_of_france_is_paris(
    source: ModelSource, start_server: StartServer, stored_as: str, engine: EngineConfig
) -> None:
    """README's question has "Paris" in its answer, whatever the weights are stored in."""
    if stored_as == "bfloat16" and not Kernels.of(built_library()).bfloat16_dots:
        return  # torch serves it on this processor; test_emulated_processors.py tests the fused step on another
    runner = load_model(source, engine, quiet).runner
    assert runner.name.startswith(f"fused-{stored_as}")
    server = await start_server(runner=runner)
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = await server.post(CHAT, messages=[question], temperature=0, max_tokens=24)
    assert "Paris" in answer["choices"][0]["message"]["content"]
