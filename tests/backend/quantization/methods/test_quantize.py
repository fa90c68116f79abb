"""A model becomes a directory in fewer bits; an interrupted run resumes, and a failed one leaves nothing behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.errors import ModelError
from backend.model_loader.linears import linears
from backend.model_loader.source import REPORT_FILE
from backend.model_loader.weights import dense, load_weights, read_config
from backend.quantization.methods import recipe
from backend.quantization.methods.gptq import ActOrder
from backend.quantization.methods.quantize import Quantization
from backend.quantization.methods.recipe import METHODS, Recipe
from backend.quantization.methods.report import QuantizationReport
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.runners.torch.runner import TorchRunner
from tests.backend.quantization.methods.small_model import save_small_model
from tests.backend.random_models import KINDS, chunked, random_tokens, relative_error

INT4, INT8 = IntScheme(4, 32), IntScheme(8)
RECIPES = {
    "rtn": Recipe("rtn", INT4),
    "gptq": Recipe("gptq", INT4),
    "awq": Recipe("awq", INT4),
    "mixed": Recipe("mixed", INT4, average_bits=7.0),
}


class Killed(BaseException):
    """In the place of a signal that ends the process."""


def quiet(sentence: str) -> None:
    """Progress that is thrown away."""


def calibration(windows: int = 8, tokens: int = 48) -> torch.Tensor:
    """Token ids of the small vocabulary."""
    return torch.from_numpy(random_tokens(windows * tokens)).long().view(windows, tokens)


def quantization(source: Path, out: Path, recipe: Recipe) -> Quantization:
    """A quantisation with calibration data."""
    return Quantization(source, out, recipe, calibration())


def logits(directory: Path) -> torch.Tensor:
    """The logits of the runner that serves a directory."""
    config = read_config(directory)
    runner = TorchRunner(config, load_weights(directory, config), num_blocks=8, max_context=128)
    return chunked(runner, random_tokens(90, seed=9), 90)


def files(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def stop_after_a_layer(source: Path, out: Path) -> None:
    """Leaves the partial folder of a GPTQ run."""

    def progress(sentence: str) -> None:
        if sentence.startswith("layer 1"):
            raise Killed

    with pytest.raises(Killed):
        quantization(source, out, RECIPES["gptq"]).run(progress)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_makes_a_directory_that_is_served(method: str, source: Path, tmp_path: Path) -> None:
    """Each method writes a directory that is served, and its report has each matrix's weight and output error."""
    out = tmp_path / "out"
    report = quantization(source, out, RECIPES[method]).run(quiet)
    kept = json.loads((out / REPORT_FILE).read_text())
    assert kept == json.loads(json.dumps(report.as_json()))
    assert [layer.layer for layer in report.layers] == [0, 1, 2, 3]
    matrices = [matrix for layer in report.layers for matrix in layer.matrices]
    config = read_config(out)
    weights = load_weights(out, config)
    in_file = linears(weights)
    assert sorted(matrix.name for matrix in matrices) == sorted(in_file)
    original = linears(load_weights(source, config))
    for matrix in matrices:
        weight, packed = original[matrix.name], in_file[matrix.name]
        if method != "awq":  # whose weights are scaled before they are rounded
            error = (dense(packed).float() - dense(weight)).norm() / dense(weight).norm()
            assert matrix.weight_error == pytest.approx(float(error), rel=1e-4, abs=1e-7)
        assert matrix.output_error is not None
        assert 0 < matrix.output_error < 0.3
        if "down_proj" in matrix.name and matrix.scheme.startswith("int4"):
            assert matrix.scheme == "int4"
            assert "in place of int4-g32, whose groups do not divide 144 inputs" in matrix.notes[0]
    assert report.divergence is not None
    assert 0 < report.divergence.kl < 1
    assert relative_error(logits(out), logits(source)) < 0.7
    assert not out.with_name("out.partial").exists()
    assert "bits a weight" in report.as_table()


def test_methods_lose_less_than_rounding_to_nearest(source: Path, tmp_path: Path) -> None:
    """GPTQ, mixed precision and int8 change the predictions on calibration data less than rounding to int4 does."""

    def kl(recipe: Recipe, name: str) -> float:
        divergence = quantization(source, tmp_path / name, recipe).run(quiet).divergence
        assert divergence is not None
        return divergence.kl

    nearest = kl(RECIPES["rtn"], "rtn")
    assert kl(RECIPES["gptq"], "gptq") < 0.8 * nearest
    assert kl(RECIPES["mixed"], "mixed") < 0.5 * nearest
    assert kl(Recipe("rtn", INT8), "int8") < 0.05 * nearest


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3-moe-mixed", "gemma2"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_families_are_quantised_whole(method: str, kind: str, tmp_path: Path) -> None:
    """Each family in eight bits is served with a small loss, so every changed tensor was written."""
    save_small_model(tmp_path / "model", KINDS[kind])
    recipe = dataclasses.replace(RECIPES[method], scheme=IntScheme(8, 32))
    report = quantization(tmp_path / "model", tmp_path / "out", recipe).run(quiet)
    assert report.divergence is not None
    assert report.divergence.kl < 2e-2
    assert relative_error(logits(tmp_path / "out"), logits(tmp_path / "model")) < 0.15


def test_an_expert_that_few_tokens_chose_is_rounded_to_nearest(tmp_path: Path) -> None:
    """An expert that few tokens chose is rounded to nearest, and the report has a note of it."""
    save_small_model(tmp_path / "model", KINDS["qwen3-moe"])
    tokens = calibration(windows=1, tokens=24)
    report = Quantization(tmp_path / "model", tmp_path / "out", RECIPES["gptq"], tokens).run(quiet)
    notes = [note for layer in report.layers for matrix in layer.matrices for note in matrix.notes]
    assert any(note.startswith("rounded to nearest: only ") for note in notes)


@pytest.mark.parametrize("scheme", [INT8, Fp8Scheme(), Nf4Scheme(32), IntScheme(4, 32, "integer")])
def test_round_to_nearest_needs_no_text(
    scheme: IntScheme | Fp8Scheme | Nf4Scheme, source: Path, tmp_path: Path
) -> None:
    """Rounding to nearest needs no calibration text, and its report has no output errors."""
    report = Quantization(source, tmp_path / "out", Recipe("rtn", scheme), None).run(quiet)
    assert report.divergence is None
    assert {matrix.output_error for layer in report.layers for matrix in layer.matrices} == {None}
    assert relative_error(logits(tmp_path / "out"), logits(source)) < 0.5


@pytest.mark.parametrize(("method", "calibrated"), [("rtn", False), *((method, True) for method in METHODS)])
def test_a_killed_run_resumes_from_its_last_layer(method: str, calibrated: bool, source: Path, tmp_path: Path) -> None:
    """A killed run resumes from its last finished layer, and its files are bitwise those of an uninterrupted run."""
    tokens = calibration() if calibrated else None
    Quantization(source, tmp_path / "whole", RECIPES[method], tokens).run(quiet)

    said: list[str] = []

    def killed_after(beginning: str) -> None:
        def progress(sentence: str) -> None:
            said.append(sentence)
            if sentence.startswith(beginning):
                raise Killed

        with pytest.raises(Killed):
            Quantization(source, tmp_path / "out", RECIPES[method], tokens).run(progress)
        assert not (tmp_path / "out").exists()

    for beginning in ("layer 1 of 4", "layer 3 of 4", "layer 4 of 4", "writing"):
        killed_after(beginning)
    assert [sentence[:12] for sentence in said if sentence.startswith("layer")] == [
        f"layer {layer} of 4" for layer in (1, 2, 3, 4)
    ]
    assert "3 of 4 layers are there from before" in said
    Quantization(source, tmp_path / "out", RECIPES[method], tokens).run(quiet)
    assert not (tmp_path / "out.partial").exists()
    whole, resumed = files(tmp_path / "whole"), files(tmp_path / "out")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scheme": INT8}, "scheme int4-g32, and not int8"),
        ({"act_order": "none"}, "act_order weight, and not none"),
        ({"method": "awq"}, "method gptq, and not awq"),
    ],
)
def test_a_run_with_other_options_does_not_resume(
    changes: dict[str, ActOrder], field: str, source: Path, tmp_path: Path
) -> None:
    """A run with other options does not resume: one line names the option, and the finished layers stay."""
    stop_after_a_layer(source, tmp_path / "out")
    other = dataclasses.replace(RECIPES["gptq"], **changes)  # type: ignore[arg-type] # each has its own type
    before = sorted((tmp_path / "out.partial").iterdir())
    with pytest.raises(ModelError, match=f"out.partial: was begun with {field}; expected the same model, options and"):
        quantization(source, tmp_path / "out", other).run(quiet)
    assert sorted((tmp_path / "out.partial").iterdir()) == before


def test_a_run_of_another_revision_does_not_resume(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run begun by another revision of the code does not resume."""
    stop_after_a_layer(source, tmp_path / "out")
    monkeypatch.setattr(recipe, "REVISION", recipe.REVISION + 1)
    with pytest.raises(
        ModelError, match=rf"was begun with revision {recipe.REVISION - 1}, and not {recipe.REVISION}; "
    ):
        quantization(source, tmp_path / "out", RECIPES["gptq"]).run(quiet)


def test_a_run_with_other_data_or_another_model_does_not_resume(source: Path, tmp_path: Path) -> None:
    """A run with other calibration data or another model does not resume."""
    stop_after_a_layer(source, tmp_path / "out")
    with pytest.raises(ModelError, match="was begun with calibration: digest"):
        Quantization(source, tmp_path / "out", RECIPES["gptq"], calibration() + 1).run(quiet)
    save_small_model(tmp_path / "other")
    with pytest.raises(ModelError, match="was begun with model"):
        quantization(tmp_path / "other", tmp_path / "out", RECIPES["gptq"]).run(quiet)


def test_a_run_whose_model_files_changed_does_not_resume(tmp_path: Path) -> None:
    """A run whose model's config changed meanwhile does not resume."""
    save_small_model(tmp_path / "model")
    stop_after_a_layer(tmp_path / "model", tmp_path / "out")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "rope_theta": 2 * config.get("rope_theta", 10000.0)}))
    with pytest.raises(ModelError, match=r"was begun with files: config\.json of"):
        quantization(tmp_path / "model", tmp_path / "out", RECIPES["gptq"]).run(quiet)


def test_a_damaged_layer_file_is_refused(source: Path, tmp_path: Path) -> None:
    """A layer file that is cut off, empty or a foreign pickle is refused with its name."""
    stop_after_a_layer(source, tmp_path / "out")
    layer = tmp_path / "out.partial" / "layer-00000.pt"
    content = layer.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"cos\nsystem\n(S'true'\ntR."):
        layer.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"layer-00000.pt: cannot be read; expected .*out.partial to be deleted"):
            quantization(source, tmp_path / "out", RECIPES["gptq"]).run(quiet)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_weight_beyond_the_scheme_leaves_no_files(method: str, tmp_path: Path) -> None:
    """A weight beyond the range of the scheme is refused by name, and nothing is left behind."""
    save_small_model(tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = 1e30
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"model.layers.2.mlp.\w+: a weight is beyond the range of scales"):
        quantization(tmp_path / "model", tmp_path / "out", RECIPES[method]).run(quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_sensitivities_are_kept_for_another_budget(source: Path, tmp_path: Path) -> None:
    """A run with another budget uses the sensitivities that a failed run measured, and gives the same files."""
    out = tmp_path / "out"
    too_little = Recipe("mixed", INT4, max_kl=1e-12)
    with pytest.raises(ModelError, match="the best forms lose"):
        quantization(source, out, too_little).run(quiet)
    said: list[str] = []
    quantization(source, out, RECIPES["mixed"]).run(said.append)
    assert not any(sentence.startswith("sensitivity") for sentence in said)
    quantization(source, tmp_path / "whole", RECIPES["mixed"]).run(said.append)
    assert any(sentence.startswith("sensitivity") for sentence in said)
    one, other = files(out), files(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_a_run_with_another_budget_does_not_resume_from_layers(source: Path, tmp_path: Path) -> None:
    """A run with another budget does not resume from finished layers, which follow the first budget."""

    def progress(sentence: str) -> None:
        if sentence.startswith("layer 1"):
            raise Killed

    with pytest.raises(Killed):
        quantization(source, tmp_path / "out", RECIPES["mixed"]).run(progress)
    other = dataclasses.replace(RECIPES["mixed"], average_bits=7.5)
    with pytest.raises(ModelError, match=r"was begun with average_bits 7.0, and not 7.5"):
        quantization(source, tmp_path / "out", other).run(quiet)


def test_a_run_killed_before_its_first_file_can_be_repeated(source: Path, tmp_path: Path) -> None:
    """The lock and the unfinished file of a run that was killed at its start do not stop the next run."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "lock").touch()
    (partial / ".made-of.json").write_text("{")
    Quantization(source, tmp_path / "out", Recipe("rtn", INT8), None).run(quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("fails_at", range(5))
def test_a_full_disk_leaves_whole_files_only(
    fails_at: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves complete files only, whatever was being written, and the run resumes once there is room."""
    writes = 0
    write_bytes = Path.write_bytes

    def full(self: Path, content: bytes | memoryview) -> int:
        nonlocal writes
        writes += 1
        if writes > 2 * fails_at:
            write_bytes(self, bytes(content)[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return write_bytes(self, content)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(ModelError, match=r"cannot be written .*No space left"):
            quantization(source, out, RECIPES["gptq"]).run(quiet)
    assert not out.exists()
    assert all(not path.name.startswith(".") for path in (tmp_path / "out.partial").iterdir())
    report = quantization(source, out, RECIPES["gptq"]).run(quiet)
    assert isinstance(report, QuantizationReport)


def test_two_processes_do_not_work_in_one_folder(source: Path, tmp_path: Path) -> None:
    """A second process in the same folder is refused, and the first one finishes."""
    refused: list[str] = []

    def progress(sentence: str) -> None:
        if sentence.startswith("layer 1"):
            with pytest.raises(ModelError, match="another process is working here") as error:
                quantization(source, tmp_path / "out", RECIPES["gptq"]).run(quiet)
            refused.append(str(error.value))

    quantization(source, tmp_path / "out", RECIPES["gptq"]).run(progress)
    assert len(refused) == 1
    assert (tmp_path / "out" / REPORT_FILE).is_file()


def test_a_directory_that_is_there_is_left_alone(source: Path, tmp_path: Path) -> None:
    """An existing output directory or partial folder with other files is refused and left as it is."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(ModelError, match="out: is there already; expected a new directory"):
        quantization(source, out, RECIPES["gptq"]).run(quiet)
    assert [path.name for path in out.iterdir()] == ["mine"]
    other = tmp_path / "other.partial"
    other.mkdir()
    (other / "mine").write_text("mine")
    with pytest.raises(ModelError, match=r"other.partial: holds something else"):
        quantization(source, tmp_path / "other", RECIPES["gptq"]).run(quiet)
    assert [path.name for path in other.iterdir()] == ["mine"]


def test_a_quantised_model_is_refused(source: Path, tmp_path: Path) -> None:
    """A model that is quantised already is refused, and nothing is written."""
    Quantization(source, tmp_path / "out", Recipe("rtn", INT8), None).run(quiet)
    with pytest.raises(ModelError, match="is quantised already"):
        Quantization(tmp_path / "out", tmp_path / "again", Recipe("rtn", INT4), None).run(quiet)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("average", [4.6, 9.0])
def test_mixed_precision_holds_its_budget_and_beats_one_scheme(average: float, source: Path, tmp_path: Path) -> None:
    """Mixed precision holds its average with scales counted, and loses no more than one scheme of that size."""
    recipe = dataclasses.replace(RECIPES["mixed"], average_bits=average)
    report = quantization(source, tmp_path / "out", recipe).run(quiet)
    assert report.bits_per_weight <= average
    assert len(report.sensitivities) == 4 * 4 * 3
    of = {(part.layer, part.group, part.bits): part for part in report.sensitivities}
    for layer in range(4):
        for group in ("qkv", "o", "gate_up", "down"):
            four, eight, sixteen = (of[layer, group, bits] for bits in (4, 8, 16))
            assert four.kl > eight.kl >= sixteen.kl >= 0
            assert four.output_error > eight.output_error > sixteen.output_error
            assert four.size < eight.size < sixteen.size
    names = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj", "gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
    schemes = {matrix.name: matrix.scheme for layer in report.layers for matrix in layer.matrices}
    bits = {"int4": 4, "int4-g32": 4, "int8": 8, "bfloat16": 16}
    chosen = [
        of[layer, group, bits[schemes[f"model.layers.{layer}.{name}"]]]  # type: ignore[index] # a group's name
        for layer in range(4)
        for group, name in names.items()
    ]
    assert sum(part.size for part in chosen) == pytest.approx(
        report.bits_per_weight * sum(matrix.weights for layer in report.layers for matrix in layer.matrices)
    )
    for uniform in (4, 8, 16):
        of_uniform = [part for part in report.sensitivities if part.bits == uniform]
        if sum(part.size for part in of_uniform) <= sum(part.size for part in chosen):
            assert sum(part.kl for part in chosen) <= sum(part.kl for part in of_uniform)


def test_mixed_precision_may_be_given_a_loss(source: Path, tmp_path: Path) -> None:
    """Mixed precision with a bound on the loss takes fewer bits for a larger bound."""
    few, many = (
        quantization(source, tmp_path / str(most), Recipe("mixed", INT4, max_kl=most)).run(quiet)
        for most in (0.1, 0.002)
    )
    assert few.bits_per_weight < many.bits_per_weight


def test_an_impossible_budget_is_refused_before_measuring(source: Path, tmp_path: Path) -> None:
    """An impossible average of bits is refused, with the average that is possible, before anything is measured."""
    said: list[str] = []
    with pytest.raises(ModelError, match=r"an average of 4 bits cannot be had: all in int4-g32 has 4\.\d\d; expected"):
        quantization(source, tmp_path / "out", dataclasses.replace(RECIPES["mixed"], average_bits=4.0)).run(said.append)
    assert said == []
    assert not list(tmp_path.iterdir())


def test_layers_left_in_sixteen_bits_keep_the_models_dtype(tmp_path: Path) -> None:
    """Layers that stay in 16 bits keep the model's dtype and lose nothing."""
    save_small_model(tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*.safetensors")
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    recipe = Recipe("mixed", INT4, average_bits=13.0)
    report = quantization(tmp_path / "model", tmp_path / "out", recipe).run(quiet)
    left = [matrix for layer in report.layers for matrix in layer.matrices if matrix.scheme == "float16"]
    assert left
    assert {matrix.weight_error for matrix in left} == {0.0}


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj", "model.norm", "model.embed_tokens"])
@pytest.mark.parametrize("method", METHODS)
def test_a_nan_weight_is_refused_by_name(method: str, name: str, tmp_path: Path) -> None:
    """A NaN in any tensor is refused by the tensor's name before anything is computed."""
    save_small_model(tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(path)
    tensors[f"{name}.weight"].view(-1)[5] = math.nan
    save_file(tensors, path, {"format": "pt"})
    for tokens in (calibration(), None) if method == "rtn" else (calibration(),):
        with pytest.raises(ModelError, match=rf"{re.escape(name)}.weight holds a value that is not a finite number"):
            Quantization(tmp_path / "model", tmp_path / "out", RECIPES[method], tokens).run(quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_link_to_an_empty_directory_stands_for_it(source: Path, tmp_path: Path) -> None:
    """An output path that is a link to an empty directory is written where the link leads, and the link stays."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    Quantization(source, tmp_path / "link", Recipe("rtn", INT8), None).run(quiet)
    assert (tmp_path / "real" / "config.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_the_empty_working_directory_may_be_the_output(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory may be the output if it is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Quantization(source, Path(), Recipe("rtn", INT8), None).run(quiet)
    assert (tmp_path / "here" / "config.json").is_file()
