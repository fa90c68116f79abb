"""What is said of quantised weights that are served: what they take here, and what was lost when they were made."""

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


def test_the_loss_that_was_measured_is_said(source: Path, tmp_path: Path) -> None:
    """KL and top-1 of the report, which lies beside the weights."""
    from tokenizers import Tokenizer

    save_text(tmp_path / "text.txt")
    tokens = token_windows(Tokenizer.from_file(str(source / "tokenizer.json")), tmp_path / "text.txt", 4, 64)
    report = Quantization(source, tmp_path / "out", Recipe("gptq", IntScheme(4, 32)), tokens).run(quiet)
    summary = served(tmp_path / "out").quantization
    assert report.divergence is not None
    assert summary is not None
    assert summary.divergence == report.divergence
    assert summary.relative_error is None


def test_nothing_is_said_where_nothing_was_measured(source: Path, tmp_path: Path) -> None:
    """Round to nearest runs nothing; and many directories have no report, or one of another program."""
    Quantization(source, tmp_path / "out", Recipe("rtn", IntScheme(8)), None).run(quiet)
    report = tmp_path / "out" / REPORT_FILE
    for change in (report.read_text, lambda: report.write_text('{"of": "another program"}'), report.unlink):
        change()
        summary = served(tmp_path / "out").quantization
        assert summary is not None
        assert summary.divergence is None


@pytest.mark.parametrize("report", ["", "[]", '{"divergence": {"tokens": 3, "kl": "little", "top1": 1}}'])
def test_a_report_that_is_none_is_named(source: Path, tmp_path: Path, report: str) -> None:
    """In one line, with what to do, and before weights are read, which may take minutes."""
    Quantization(source, tmp_path / "out", Recipe("rtn", IntScheme(8)), None).run(quiet)
    (tmp_path / "out" / REPORT_FILE).write_text(report)
    (tmp_path / "out" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=rf"{REPORT_FILE}: expected a report of `keepgate quantize`, or no such file"):
        served(tmp_path / "out")


def test_bytes_are_those_that_are_held(source: Path, tmp_path: Path) -> None:
    """Weights that the fused step has to widen take what halves take, whatever their files do."""
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
