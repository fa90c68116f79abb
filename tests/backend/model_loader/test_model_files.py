"""Which safetensors files of a directory belong to the model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backend.checkpoints.tensor_store import TensorStore
from backend.errors import ModelError

INDEX = "model.safetensors.index.json"


def write(directory: Path, files: Mapping[str, Mapping[str, float]]) -> None:
    """Files of tensors with one number each."""
    for file, tensors in files.items():
        save_file({name: torch.tensor([number]) for name, number in tensors.items()}, directory / file)


def numbers(directory: Path) -> dict[str, float]:
    store = TensorStore(directory)
    return {name: float(store.raw(name)) for name in store.names()}


def test_only_model_safetensors_is_read_if_it_is_there(tmp_path: Path) -> None:
    """If model.safetensors is there, no other file and no index is read."""
    write(
        tmp_path,
        {"model.safetensors": {"a": 1}, "zz-copy.safetensors": {"a": 3}, "model-00001-of-00009.safetensors": {"b": 4}},
    )
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00009.safetensors"}}))
    assert numbers(tmp_path) == {"a": 1}


def test_an_index_names_the_files(tmp_path: Path) -> None:
    """The files that the index names are read, and no others."""
    write(tmp_path, {"one.safetensors": {"a": 1}, "two.safetensors": {"b": 2}, "zz.safetensors": {"a": 3}})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert numbers(tmp_path) == {"a": 1, "b": 2}


def test_without_either_all_files_are_read(tmp_path: Path) -> None:
    """Without an index all regular safetensors files are read, and pipes are ignored."""
    write(tmp_path, {"one.safetensors": {"a": 1}, "two.safetensors": {"b": 2}})
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert numbers(tmp_path) == {"a": 1, "b": 2}


@pytest.mark.parametrize("other", ["a", "language_model.a"])
def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path, other: str) -> None:
    """A tensor that two files hold is refused with both files."""
    write(tmp_path, {"one.safetensors": {"a": 1}, "two.safetensors": {other: 2}})
    with pytest.raises(ModelError, match=rf"two\.safetensors: tensor {other} is a of .*one\.safetensors once more"):
        TensorStore(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "weight_map is None, expected the name of a file for each tensor"),
        ('{"weight_map": {"a": 3}}', "weight_map is {.*}, expected the name of a file for each tensor"),
        ('{"weight_map": {"a": "three.safetensors"}}', "weight_map names three.safetensors, expected files of"),
        ('{"weight_map": {"a": "../one.safetensors"}}', "weight_map names one.safetensors, expected files of"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "weight_map names passwd, expected files of"),
    ],
)
def test_an_invalid_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    """An index that is invalid, or names a file outside the directory, is refused."""
    write(tmp_path, {"one.safetensors": {"a": 1}})
    directory = tmp_path / "model"
    directory.mkdir()
    write(directory, {"one.safetensors": {"a": 1}})
    (directory / INDEX).write_text(index)
    with pytest.raises(ModelError, match=rf"{INDEX}.*{message}"):
        TensorStore(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_nan_or_infinite_weight_is_refused(tmp_path: Path, dtype: torch.dtype, number: float) -> None:
    """A NaN or infinity anywhere in a tensor is refused, and the extreme finite values are read."""
    about = torch.finfo(dtype)
    sound = torch.linspace(-1, 1, 6000).to(dtype).reshape(60, 100)
    sound[0, :4] = torch.tensor([about.max, about.min, about.smallest_normal, -0.0], dtype=dtype)
    broken = sound.clone()
    broken[41, 7] = number
    save_file({"sound": sound, "broken": broken}, tmp_path / "model.safetensors")
    store = TensorStore(tmp_path)
    assert torch.equal(store.take("sound", (60, 100)), sound)
    with pytest.raises(
        ModelError, match=r"model\.safetensors: tensor broken holds a value that is not a finite number"
    ):
        store.take("broken", (60, 100))


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    """A directory without safetensors files is refused."""
    with pytest.raises(ModelError, match=r"no \.safetensors file here"):
        TensorStore(tmp_path)
