"""`keepgate quantize` as a process: its output, its exit status, and how it resumes after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from backend.commands import eval as eval_command
from backend.commands import quantize as quantize_command
from backend.commands.quantize import run
from backend.model_loader.linears import linears
from backend.model_loader.weights import load_weights, read_config
from backend.quantized_weights.int_scheme import IntScheme
from tests.backend.quantization.methods.small_model import save_text

SMALL = ["--windows", "4", "--window-tokens", "48", "--threads", "1", "--group-size", "32"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some 10,000 tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    save_text(path)
    return path


@pytest.fixture(autouse=True)
def outlives_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps a command that runs in this process from ending it with a broken pipe."""
    for module in (quantize_command, eval_command):
        monkeypatch.setattr(module, "exit_on_broken_pipe", lambda: None)


def command(*words: str) -> list[str]:
    """The words that start the command as a process."""
    return [sys.executable, "-m", "backend.commands.quantize", *words]


def test_a_killed_process_resumes(source: Path, text: Path, tmp_path: Path) -> None:
    """After SIGKILL behind the first layer, a second process computes the other layers and prints the report."""
    words = [str(source), "--method", "gptq", "--calibration", str(text), "--out", str(tmp_path / "out"), *SMALL]
    with subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if "layer 1 of 4" in line:
                first.send_signal(signal.SIGKILL)
                break
    assert first.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    second = subprocess.run(command(*words, "--json"), capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert "layers are there from before" in second.stderr
    assert "layer 1 of 4" not in second.stderr
    report = json.loads(second.stdout)
    assert len(report["layers"]) == 4
    assert report == json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_activations_in_eight_bits(method: str, source: Path, text: Path, tmp_path: Path) -> None:
    """`--activation-bits 8` is written for every quantised layer, for rtn and gptq."""
    words = [str(source), "--method", method, "--bits", "8", "--activation-bits", "8", "--out", str(tmp_path / "out")]
    calibration = ["--calibration", str(text), "--windows", "4", "--window-tokens", "48"] if method == "gptq" else []
    assert run([*words, *calibration, "--threads", "1"]) == 0
    weights = load_weights(tmp_path / "out", read_config(tmp_path / "out"))
    schemes = {name: linear.scheme for name, linear in linears(weights).items() if not isinstance(linear, torch.Tensor)}
    assert set(schemes.values()) == {IntScheme(8, activation_bits=8)}
    assert len(schemes) == 4 * 7


def test_the_table_says_what_was_lost(
    source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a line for each layer, the notes, the bits per weight and the KL divergence."""
    words = [str(source), "--method", "awq", "--calibration", str(text), "--out", str(tmp_path / "out")]
    assert run([*words, "--windows", "4", "--window-tokens", "48", "--threads", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["layer", "seconds", "weight", "error", "output", "error", "drift", "schemes"]
    assert [line.split()[0] for line in out[1:5]] == ["0", "1", "2", "3"]
    note = "int4-g32 in place of int4-g128, whose groups do not divide 96 inputs"
    assert f"model.layers.3.self_attn.o_proj: {note}" in out
    assert "bits a weight in the layers, scales included" in out[-2]
    assert "KL to the unquantised model" in out[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "gtpq"], "invalid choice: 'gtpq'"),
        (["--method", "gptq"], "--method gptq needs a text: --calibration FILE"),
        (["--method", "mixed", "--calibration", "x"], "needs one of --average-bits and --max-kl"),
        (["--average-bits", "5"], "--average-bits is for --method mixed"),
        (["--average-bits", "3"], "'3' is out of range, expected 4 to 16"),
        (["--max-kl", "nan"], "'nan' is out of range"),
        (["--bits", "3"], "invalid choice: 3"),
        (["--activation-bits", "4"], "invalid choice: 4"),
        (["--activation-bits", "8"], "--activation-bits 8 is for --bits 8"),
        (["--scheme", "fp8", "--activation-bits", "8"], "--activation-bits is for integers, and not for --scheme fp8"),
        (["--scheme", "fp8", "--bits", "8"], "--bits is for integers, and not for --scheme fp8"),
        (["--scheme", "nf4", "--method", "gptq", "--calibration", "x"], "--method gptq is for integers"),
        (["--group-size", "0"], "'0' is out of range, expected 1 or more"),
        (["--seed", "9" * 23], f"'{'9' * 23}' is out of range, expected 0 to 18446744073709551615"),
        (["--seed", "-1"], "'-1' is out of range, expected 0 to 18446744073709551615"),
        (["--act-order", "order"], "--act-order is for --method gptq and mixed, and not for rtn"),
        (
            ["--method", "awq", "--calibration", "x", "--act-order", "none"],
            "for --method gptq and mixed, and not for a",
        ),
        (["--method", "rtn", "--seed", "5"], "--seed is for a calibration text: --calibration FILE"),
        (["--windows", "3"], "--windows is for a calibration text: --calibration FILE"),
        (["--window-tokens", "3"], "--window-tokens is for a calibration text: --calibration FILE"),
        (["--act-order", "--method", "gptq", "--calibration", "x"], "--act-order: expected one argument"),
    ],
)
def test_conflicting_options_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conflicting or unusable options are refused in one line before anything is loaded."""
    with pytest.raises(SystemExit) as ended:
        run(["default", "--out", str(tmp_path / "out"), *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{source}", "--calibration", "{here}/short.txt"), "short.txt: 9 tokens, and 128 windows of 512 need 65,536"),
        (("{source}", "--calibration", "{here}/absent"), "absent: cannot be read"),
        (("{here}/no-model",), "no config.json here"),
        (("no-such-model",), "expected 'default', a directory"),
        (("{source}", "--out", "{here}/there"), "there: is there already; expected a new directory"),
        (("{source}", "--out", "/proc/here"), "/proc/here.partial: cannot be made"),
    ],
)
def test_a_run_that_cannot_start_is_refused_in_one_line(
    words: tuple[str, ...], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without enough text, a model or a writable output ends with one line and writes nothing."""
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    (tmp_path / "no-model").mkdir()
    before = sorted(tmp_path.iterdir())
    named = [word.format(source=source, here=tmp_path) for word in words]
    assert run(["--out", str(tmp_path / "out"), *named, "--threads", "1"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("keepgate quantize: ")
    assert message in said[-1]
    assert len(said) == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", [quantize_command, eval_command], ids=["quantize", "eval"])
def test_an_interrupt_at_the_start_shows_no_traceback(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupt at the start of `quantize` or `eval` ends with status 130 and no traceback."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    (tmp_path / "text.txt").write_text("some text")
    monkeypatch.setattr(command, "ignore_broken_pipe", interrupt)
    needed = "--out" if command is quantize_command else "--text"
    assert command.run(["default", needed, str(tmp_path / "text.txt")]) == 130
    assert len(capsys.readouterr().err.splitlines()) <= 1


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no device that is always full")
def test_an_output_that_cannot_be_printed_loses_no_files(source: Path, tmp_path: Path) -> None:
    """The directory is complete though the table cannot be printed."""
    words = command(str(source), "--bits", "8", "--out", str(tmp_path / "out"), "--threads", "1")
    with open("/dev/full", "w") as full:
        subprocess.run(words, stdout=full, stderr=subprocess.DEVNULL, check=False)
    assert (tmp_path / "out" / "quantization_report.json").is_file()
    assert not (tmp_path / "out.partial").exists()
