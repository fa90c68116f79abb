"""Digests of weight files."""

import json
import os
import struct
from pathlib import Path

import pytest

from prefix_store.identity.files import digest_of_files

_MIB = 2**20


def safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    """A file in the format of safetensors, each tensor a row of bytes."""
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(tensors.values()))
    return path


def flip(path: Path, offset: int) -> None:
    """Changes one byte; size and time stay."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A sparse file: with it a model has more than the 4 GiB that are read completely."""
    path = tmp_path / "weights-2"
    with path.open("wb") as file:
        file.truncate(4 * 2**30)
    return path


async def test_any_byte_of_a_model_of_some_gigabytes_counts(tmp_path: Path) -> None:
    """It is read completely, so a change with equal size and time counts."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 * _MIB))
    before = await digest_of_files([file])
    flip(file, 2 * _MIB + 12_345)
    assert await digest_of_files([file]) != before
    flip(file, 2 * _MIB + 12_345)
    assert await digest_of_files([file]) == before


async def test_the_folder_counts_for_nothing(tmp_path: Path) -> None:
    """Two hosts with a model in different folders share its blocks."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one").write_bytes(b"1")
        (tmp_path / folder / "two").write_bytes(b"2")
    first = await digest_of_files([tmp_path / "a/one", tmp_path / "a/two"])
    assert first == await digest_of_files([tmp_path / "b/two", tmp_path / "b/one"])
    assert first.hex() == "999c90052de020fb278c96e1afb60477"


async def test_contents_do_not_move_between_files(tmp_path: Path) -> None:
    """The border between two files counts."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"ab")
    two.write_bytes(b"c")
    before = await digest_of_files([one, two])
    one.write_bytes(b"a")
    two.write_bytes(b"bc")
    assert await digest_of_files([one, two]) != before


@pytest.mark.parametrize("tensor", ["embedding", "norm", "head"])
async def test_every_tensor_of_a_large_model_is_sampled(tmp_path: Path, large: Path, tensor: str) -> None:
    """A change of any tensor is detected, even of a small one."""
    tensors = {"embedding": bytes(9 * _MIB), "norm": bytes(700), "head": bytes(5 * _MIB)}
    file = safetensors(tmp_path / "model.safetensors", tensors)
    before = await digest_of_files([file, large])
    safetensors(file, tensors | {tensor: b"\x01" * len(tensors[tensor])})
    assert await digest_of_files([file, large]) != before


async def test_another_name_or_shape_of_a_tensor_is_another_model(tmp_path: Path, large: Path) -> None:
    """The header counts even if the tensors' bytes are equal."""
    data = bytes(2 * _MIB)
    file = safetensors(tmp_path / "model.safetensors", {"a": data, "b": data})
    before = await digest_of_files([file, large])
    safetensors(file, {"a": data, "c": data})
    assert await digest_of_files([file, large]) != before


async def test_a_large_file_of_any_format_is_sampled_to_its_end(tmp_path: Path, large: Path) -> None:
    """The digest covers its size, sampled pages and the last page."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"\xff" * 8 + bytes(9 * _MIB))
    before = await digest_of_files([file, large])
    seen = {before}
    for offset in (100, 4 * _MIB + 5, file.stat().st_size - 1):
        flip(file, offset)
        seen.add(await digest_of_files([file, large]))
        flip(file, offset)
    with file.open("ab") as longer:
        longer.write(b"\0")
    seen.add(await digest_of_files([file, large]))
    assert len(seen) == 5


async def test_a_header_that_lies_is_only_bytes(tmp_path: Path, large: Path) -> None:
    """Tensors with offsets outside of the file are not read."""
    seen = set()
    for offsets in ([-5, 10], [0, 10**15], [10**15, 10**15 + 1], [10, 0]):
        head = json.dumps({"a": {"dtype": "U8", "shape": [10], "data_offsets": offsets}}).encode().ljust(200)
        file = tmp_path / "model.safetensors"
        file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(10))
        seen.add(await digest_of_files([file, large]))
    assert len(seen) == 4


async def test_files_that_cannot_be_a_model_are_refused(tmp_path: Path) -> None:
    """No files, two files of one name, and a missing file are refused."""
    with pytest.raises(ValueError, match="no files"):
        await digest_of_files([])
    with pytest.raises(ValueError, match="two files are called x"):
        await digest_of_files([tmp_path / "x", tmp_path / "y" / "x"])
    with pytest.raises(FileNotFoundError):
        await digest_of_files([tmp_path / "x"])
