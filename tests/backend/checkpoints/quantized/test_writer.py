"""The contents of a written directory, and that a failed write leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from backend.checkpoints.quantized.writer import write_checkpoint
from backend.checkpoints.tensor_store import TensorStore
from backend.errors import ModelError
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import QuantizedLinear
from tests.backend.checkpoints.quantized.directories import NAME, NORM, kept, read_linear, write_source

OTHER = "model.layers.0.self_attn.k_proj"
WEIGHT = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
LINEAR = IntScheme(4, 32).pack(WEIGHT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with two linear layers and its other files."""
    return write_source(tmp_path / "source", {NAME: WEIGHT, OTHER: WEIGHT[:4].clone()})


def test_what_is_not_quantised_is_copied(source: Path, tmp_path: Path) -> None:
    """Other tensors, the tokenizer, the generation config and the config's fields are copied unchanged."""
    write_checkpoint(tmp_path / "written", source, {NAME: LINEAR})
    assert sorted(path.name for path in (tmp_path / "written").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "written/model.safetensors").stat().st_mode & 0o777 == 0o644
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "written/model.safetensors")
    assert f"{NAME}.weight" not in after
    for name in before.keys() - {f"{NAME}.weight"}:
        assert torch.equal(before[name], after[name])
    assert (tmp_path / "written/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "written/config.json").read_text(encoding="utf-8"))
    assert config.pop("quantization_config")["ignore"] == [OTHER, "lm_head"]
    assert config == json.loads((source / "config.json").read_text(encoding="utf-8"))
    assert read_linear(tmp_path / "written", OTHER, 4, 64) is None


def test_other_tensors_may_be_replaced(source: Path, tmp_path: Path) -> None:
    """Other tensors may be replaced, as AWQ does with norms."""
    write_checkpoint(tmp_path / "written", source, {NAME: LINEAR}, {NORM: torch.full((4,), 7.0)})
    assert TensorStore(tmp_path / "written").raw(NORM).tolist() == [7.0] * 4


def test_a_large_model_is_in_several_files(source: Path, tmp_path: Path) -> None:
    """A large model is written in several files, with an index that names each tensor's file and the total size."""
    write_checkpoint(tmp_path / "written", source, {NAME: LINEAR}, shard_bytes=300)
    index = json.loads((tmp_path / "written/model.safetensors.index.json").read_text(encoding="utf-8"))
    sizes = 0
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "written" / file, "pt") as opened:
            sizes += opened.get_tensor(name).nbytes
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sizes
    back = read_linear(tmp_path / "written", NAME, 16, 64)
    assert back is not None
    assert kept(back) == kept(LINEAR)


def test_a_multimodal_models_tensor_names_stay(tmp_path: Path) -> None:
    """A multimodal model keeps its tensor names, and its decoder's layers are read by their own."""
    long = NAME.replace("model.", "model.language_model.", 1)
    source = write_source(tmp_path / "source", {long: WEIGHT})
    write_checkpoint(tmp_path / "written", source, {NAME: LINEAR})
    assert f"{long}.weight_packed" in load_file(tmp_path / "written/model.safetensors")
    back = read_linear(tmp_path / "written", NAME, 16, 64)
    assert back is not None
    assert kept(back) == kept(LINEAR)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"model.layers.9.x": LINEAR}, r"source: there is no model.layers.9.x.weight to have been quantised"),
        ({OTHER: LINEAR}, r"k_proj is \[16, 64\], and \[4, 64\] in the source"),
        ({OTHER: IntScheme(8).pack(WEIGHT[:4]), NAME: Nf4Scheme().pack(WEIGHT)}, r"needs another format"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    layers: Mapping[str, QuantizedLinear], message: str, source: Path, tmp_path: Path
) -> None:
    """A layer that does not fit the source is refused by name, and nothing is left behind."""
    with pytest.raises(ModelError, match=message):
        write_checkpoint(tmp_path / "written", source, layers)
    assert list(tmp_path.iterdir()) == [source]


def test_a_directory_with_something_in_it_is_left_alone(source: Path, tmp_path: Path) -> None:
    """A target directory with files in it is refused and left as it is."""
    (tmp_path / "written").mkdir()
    (tmp_path / "written/mine").touch()
    with pytest.raises(ModelError, match="written: is there already, expected a new or an empty directory"):
        write_checkpoint(tmp_path / "written", source, {NAME: LINEAR})
    assert [path.name for path in (tmp_path / "written").iterdir()] == ["mine"]


def test_a_model_is_not_quantised_twice(source: Path, tmp_path: Path) -> None:
    """A source that is quantised already is refused."""
    write_checkpoint(tmp_path / "once", source, {NAME: LINEAR})
    with pytest.raises(ModelError, match="once: is quantised already, expected plain weights"):
        write_checkpoint(tmp_path / "twice", tmp_path / "once", {OTHER: LINEAR})


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """A full disk is one line with the target, and nothing is left behind."""
    # A process of its own, as the limit on the size of its files stays.
    script = """
import resource, signal, sys
from pathlib import Path
import torch
from backend.errors import ModelError
from backend.checkpoints.quantized.writer import write_checkpoint
from backend.quantized_weights.int_scheme import IntScheme

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
target, source, name = sys.argv[1:]
try:
    write_checkpoint(Path(target), Path(source), {name: IntScheme(8).pack(torch.ones(16, 64))})
except ModelError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "written", source, NAME], capture_output=True, text=True, check=True
    )
    assert "written: cannot be written" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [source]
