"""Tensors written to safetensors files of a bounded size, with an index where there is more than one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


class Shards:
    """Writes into a directory. No more than one file's tensors are held in memory.

    Args:
        most: bytes of tensors after which a file is complete.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self._directory = directory
        self._most = most
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._names: list[list[str]] = []  # of the tensors of each file
        self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor. Raises SafetensorError or OSError if a file cannot be written."""
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._most:
            self._write()
        # safetensors refuses tensors that share memory, such as slices of one.
        self._waiting[name] = tensor.contiguous().clone()
        self._waiting_bytes += tensor.nbytes

    def close(self) -> None:
        """Writes the remaining tensors, renames the files and writes the index. Raises as `add`."""
        self._write()
        if len(self._names) == 1:
            self._path(0).rename(self._directory / "model.safetensors")
            return
        count = len(self._names)
        files = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
        for number, file in enumerate(files):
            self._path(number).rename(self._directory / file)
        contents = {
            "metadata": {"total_size": self._bytes},
            "weight_map": {name: file for file, names in zip(files, self._names, strict=True) for name in names},
        }
        index = self._directory / "model.safetensors.index.json"
        index.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        path = self._path(len(self._names))
        save_file(self._waiting, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes files that only the owner can read
        self._names.append(list(self._waiting))
        self._bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.safetensors"
