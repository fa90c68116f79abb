"""The summary of served quantised weights: their size in memory, and the loss measured when they were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.engine.config import EngineConfig
from backend.errors import ModelError
from backend.model import ServedModel, load_model
from backend.model_loader.source import REPORT_FILE, ModelSource
from backend.quantization.calibration.text import token_windows
from backend.quantization.methods.quantize import Quantization
from backend.quantization.methods.recipe import Recipe
from backend.quantized_weights.int_scheme import IntScheme
from tests.backend.conftest import built_library, quiet
from tests.backend.quantization.methods.small_model import save_small_model, save_text
from tests.backend.random_models import KINDS, of_vectors


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that the fused step computes."""
    directory = tmp_path_factory.mktemp("model")
    save_small_model(directory, of_vectors(KINDS["smollm2"], intermediate_size=320))
    return directory


def served(directory: Path, said: list[str] | None = None) -> ServedModel:
    engine = EngineConfig(threads=1, kv_memory=2**22, device="cpu")
    return load_model(ModelSource(directory, "small"), engine, quiet if said is None else said.append)


def test_the_summary_has_the_divergence_of_the_report(source: Path, tmp_path: Path) -> None:
    """The served summary has the divergence of the report beside the weights."""
    from tokenizers import Tokenizer

    save_text(tmp_path / "text.txt")
    tokens = token_windows(Tokenizer.from_file(str(source / "tokenizer.json")), tmp_path / "text.txt", 4, 64)
    report = Quantization(source, tmp_path / "out", Recipe("gptq", IntScheme(4, 32)), tokens).run(quiet)
    summary = served(tmp_path / "out").quantization
    assert report.divergence is not None
    assert summary is not None
    assert summary.divergence == report.divergence
    assert summary.relative_error is None


def test_the_summary_has_no_divergence_without_a_measured_one(source: Path, tmp_path: Path) -> None:
    """The served summary has no divergence if nothing was measured, or the report is absent or of another program."""
    Quantization(source, tmp_path / "out", Recipe("rtn", IntScheme(8)), None).run(quiet)
    report = tmp_path / "out" / REPORT_FILE
    for change in (report.read_text, lambda: report.write_text('{"of": "another program"}'), report.unlink):
        change()
        summary = served(tmp_path / "out").quantization
        assert summary is not None
        assert summary.divergence is None


@pytest.mark.parametrize("report", ["", "[]", '{"divergence": {"tokens": 3, "kl": "little", "top1": 1}}'])
def test_an_invalid_report_is_named(source: Path, tmp_path: Path, report: str) -> None:
    """An invalid report is named in one line before the weights are read."""
    Quantization(source, tmp_path / "out", Recipe("rtn", IntScheme(8)), None).run(quiet)
    (tmp_path / "out" / REPORT_FILE).write_text(report)
    (tmp_path / "out" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=rf"{REPORT_FILE}: expected a report of `keepgate quantize`, or no such file"):
        served(tmp_path / "out")


def test_the_summary_counts_the_bytes_in_memory(source: Path, tmp_path: Path) -> None:
    """The summary counts the bytes in memory, where the fused step widens a scheme without a layout to half floats."""
    built_library()
    quantized = Recipe("rtn", IntScheme(8, 32, "integer"))
    report = Quantization(source, tmp_path / "out", quantized, None).run(quiet)
    assert report.bits_per_weight < 10
    said: list[str] = []
    model = served(tmp_path / "out", said)
    assert model.runner.name.startswith("fused-")
    summary = model.quantization
    assert summary is not None
    assert sum(summary.held_as.values()) == summary.weight_bytes
    assert summary.bits_per_weight >= 16
    assert summary.schemes["int8-asym-g32"] == 7 * model.config.num_layers
    assert "the fused step has no layout for some of the weights, and widens them: int8-asym-g32-as-float16" in said
    assert json.loads(json.dumps(summary.held_as)) == summary.held_as
