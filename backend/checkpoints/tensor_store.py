"""Tensors by name over all safetensors files of a directory. The files stay memory-mapped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.errors import ModelError
from backend.models.json_fields import Fields
from backend.models.json_file import read_json_object

if TYPE_CHECKING:
    import torch

# Floats without a scale, as safetensors and torch name them; eight-bit ones need a separate scale.
_WEIGHT_DTYPES = {"F32": "torch.float32", "BF16": "torch.bfloat16", "F16": "torch.float16", "F64": "torch.float64"}
_INDEX = "model.safetensors.index.json"


class TensorStore:
    """Reads tensors on demand, and records which were read. Not thread-safe.

    Raises:
        ModelError: there is no safetensors file, or one cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.directory = directory
        self._files: dict[str, tuple[Path, Any, str]] = {}
        self._read: set[str] = set()
        for path in model_files(directory):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: not a readable safetensors file ({error})") from error
            names: list[str] = list(file.keys())  # type: ignore[no-untyped-call] # safetensors publishes no types for it
            for name in names:
                before = self._files.setdefault(decoder_name(name), (path, file, name))
                if before[1] is not file or before[2] != name:
                    raise ModelError(
                        f"{path}: tensor {name} is {before[2]} of {before[0]} once more; expected one of them"
                    )

    def names(self) -> Iterable[str]:
        """All names, as `decoder_name` returns them."""
        return self._files.keys()

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._files

    def is_float(self, name: str) -> bool:
        """Whether a tensor holds floats without a scale. This does not mark the tensor as read.

        Raises ModelError if there is none.
        """
        _, file, stored_name = self._file(name)
        dtype: str = file.get_slice(stored_name).get_dtype()
        return dtype in _WEIGHT_DTYPES

    def unread(self) -> list[str]:
        """Names of the tensors that were never read, sorted."""
        return sorted(self._files.keys() - self._read)

    def path(self, name: str) -> Path:
        """The file that a tensor is in. Raises ModelError where there is none."""
        return self._file(name)[0]

    def stored_name(self, name: str) -> str:
        """A tensor's name in its file. Raises ModelError where there is none."""
        return self._file(name)[2]

    def raw(self, name: str) -> torch.Tensor:
        """A tensor as stored, of any shape and dtype. Raises ModelError if there is none."""
        _, file, stored_name = self._file(name)
        tensor: torch.Tensor = file.get_tensor(stored_name)
        self._read.add(name)
        return tensor

    def take(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """A tensor of floats, or a part of it; no more than the part is read.

        Args:
            shape: of the whole tensor.
            rows: those wanted of the first axis; None: all.
            columns: the same of the second axis.

        Raises:
            ModelError: it is missing, or of another shape or dtype, or holds a number that is not finite; names it.
        """
        _, file, stored_name = self._file(name)
        about, path = file.get_slice(stored_name), self.path(name)
        if tuple(about.get_shape()) != shape:
            raise ModelError(f"{path}: tensor {name} has shape {about.get_shape()}, expected {list(shape)}")
        if about.get_dtype() not in _WEIGHT_DTYPES:
            expected = ", ".join(_WEIGHT_DTYPES.values())
            raise ModelError(f"{path}: tensor {name} is {self.raw(name).dtype}, expected one of {expected}")
        if rows is None and columns is None:
            tensor: torch.Tensor = self.raw(name)
        else:
            wanted = [slice(None) if own is None else slice(own.start, own.stop) for own in (rows, columns)]
            tensor = about[tuple(wanted[: len(shape)])].contiguous()
            self._read.add(name)
            if not tensor.numel():
                return tensor
        low, high = tensor.aminmax()  # many times faster than isfinite for each
        if not math.isfinite(low) or not math.isfinite(high):
            raise ModelError(f"{path}: tensor {name} holds a value that is not a finite number")
        return tensor

    def _file(self, name: str) -> tuple[Path, Any, str]:
        if name not in self._files:
            raise ModelError(f"{self.directory}: tensor {name} is missing in its safetensors files")
        return self._files[name]


def model_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, without other files in the directory, such as a training state.

    They are ``model.safetensors``; or else those that its index names; or, without one, all that there are.

    Raises:
        ModelError: there is none, or the index is invalid or names missing files.
    """
    whole, index = directory / "model.safetensors", directory / _INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        paths = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
        if not paths:
            raise ModelError(f"{directory}: no .safetensors file here")
        return paths
    fields = Fields(read_json_object(index), str(index))
    files = fields.values.get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise fields.error("weight_map", "the name of a file for each tensor")
    paths = [directory / file for file in sorted(set(files.values()))]
    for path in paths:
        if path.parent != directory or not path.is_file():
            raise ModelError(f"{index}: weight_map names {path.name}, expected files of {directory} that are there")
    return paths


def decoder_name(name: str) -> str:
    """A tensor's name in a text-only decoder: multimodal models put one of two prefixes before it."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
