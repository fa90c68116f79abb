"""The engine's part of ``keepgate doctor``: what it says of models, memory and kernels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from backend.commands import check
from backend.model_loader.source import resolve_model
from tests.backend.conftest import quiet

Said = dict[str, dict[str, str]]
QUANTISED = Path(__file__).resolve().parents[2] / "data" / "quantised"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    """The findings by their check."""
    assert check.run(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line.keys() == {"check", "status", "summary", "advice"} for line in lines)
    assert all(bool(line["advice"]) == (line["status"] != "ok") for line in lines)
    return {line["check"]: line for line in lines}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model's files without its weights, which are links."""
    source = resolve_model("default", quiet).directory
    folder = tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_a_whole_model_is_ok(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its family, its tensors and its size; the kernels are those that would serve it."""
    found = said(capsys, f"--model={model}", "--device=cpu")
    assert found["model"]["status"] == "ok"
    assert "llama, 272 tensors" in found["model"]["summary"]
    assert found["engine memory"]["status"] == "ok"
    assert found["engine kernels"]["status"] in ("ok", "warning")  # without g++, torch serves


@pytest.mark.parametrize(
    ("name", "words"), [("model.safetensors", "no .safetensors file"), ("tokenizer.json", "no tokenizer.json")]
)
def test_a_missing_file_is_a_problem(model: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is named."""
    (model / name).unlink()
    found = said(capsys, f"--model={model}", "--device=cpu")
    assert (found["model"]["status"], words in found["model"]["summary"]) == ("problem", True), found["model"]
    assert "engine memory" not in found


def test_a_truncated_file_is_a_problem(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights whose download was cut off are found without reading them all."""
    weights = model / "model.safetensors"
    part = weights.read_bytes()[:100_000]
    weights.unlink()
    weights.write_bytes(part)
    found = said(capsys, f"--model={model}", "--device=cpu")["model"]
    assert (found["status"], "not a readable safetensors file" in found["summary"]) == ("problem", True)


def test_more_kv_memory_than_there_is_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and KV blocks are compared with the machine's memory."""
    found = said(capsys, "--device=cpu", "--kv-memory=900000GB")["engine memory"]
    assert (found["status"], "do not fit" in found["summary"]) == ("problem", True)


def test_quantised_files_take_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights of a quantised checkpoint are not counted as 16 bits each."""
    folder = tmp_path / "int4"
    shutil.copytree(QUANTISED / "gptqmodel-gptq", folder)
    tokenizer = resolve_model("default", quiet).directory
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    model = check._directory(folder, lambda *finding: None)
    assert model.quantised_bytes == size
    assert config["quantization_config"]


def test_what_the_fused_step_does_not_do_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """torch would serve, and the reason is that of a start."""
    found = said(capsys, "--device=cpu", "--kv-dtype=fp8")["engine kernels"]
    assert found["status"] == "warning"
    assert "does not store keys and values in fp8" in found["summary"] or "no C++ compiler" in found["summary"]


def test_a_processor_without_bfloat16_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """Some multiply it, and then the fused step serves."""
    found = said(capsys, "--device=cpu", "--dtype=bfloat16")["engine kernels"]
    reasons = ("does not compute in bfloat16", "no C++ compiler")
    assert (found["status"] == "warning") == any(reason in found["summary"] for reason in reasons)
    assert found["status"] in ("ok", "warning")


@pytest.mark.parametrize("quantization", ["int8", "int4", "nf4", "fp8"])
def test_the_kernels_are_tried_with_the_weights_of_the_options(
    quantization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each form of weights passes the self-test, or torch serves for want of a compiler."""
    found = said(capsys, "--device=cpu", f"--quantization={quantization}")["engine kernels"]
    assert found["status"] == "ok" or "no C++ compiler" in found["summary"]
