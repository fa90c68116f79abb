"""The folder of an unfinished quantisation: a killed run resumes after the last complete layer.

    made-of.json          model, method and options; a run with others may not resume here
    layer-00007.pt        a quantised layer
    windows-00008.pt      calibration inputs of the next layer, if any
    sensitivities.json    sensitivities for mixed precision

Each file is written under another name and renamed: it is complete or absent.
"""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from backend.errors import ModelError
from backend.models.json_file import read_json_object
from backend.quantization.methods.layerwise import QuantizedLayer, Windows
from backend.quantization.methods.report import LayerReport, MatrixReport
from backend.quantization.methods.sensitivity import Sensitivity
from backend.quantized_weights.float_scheme import FloatLinear, FloatScheme
from backend.quantized_weights.fp8_scheme import Fp8Linear, Fp8Scheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.nf4_scheme import BlockScales, Nf4Linear, Nf4Scheme
from backend.quantized_weights.quantized_linear import QuantizedLinear

_CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *(IntLinear, IntScheme, Fp8Linear, Fp8Scheme, Nf4Linear, Nf4Scheme, BlockScales, FloatLinear, FloatScheme),
    *(QuantizedLayer, LayerReport, MatrixReport, Windows),
]
_Kept = TypeVar("_Kept")
_MADE_OF, _MEASURED = "made-of.json", "sensitivities.json"
_BUDGET = ("average_bits", "max_kl")
"""Options that sensitivities do not depend on: they may differ until a layer is saved."""
_EMPTY_STATE = ("lock", f".{_MADE_OF}")
"""Files of a run that was killed before it wrote ``made-of.json``."""


class PartialCheckpoint:
    """The finished part of a quantisation.

    Args:
        path: of the folder; created if missing.
        made_of: JSON values by name: model, method and options.

    Raises:
        ModelError: the folder is of another run, or cannot be used; the message says what differs.
    """

    def __init__(self, path: Path, provenance: Mapping[str, Any]) -> None:
        self.path = path
        self._made_of = provenance = json.loads(json.dumps(provenance))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"{path}: cannot be made ({error})") from error
        if (path / _MADE_OF).is_file():
            may_differ = () if any(path.glob("layer-*.pt")) else _BUDGET
            for name, then, now in _differences(read_json_object(path / _MADE_OF), provenance):
                if name not in may_differ:
                    raise ModelError(
                        f"{path}: was begun with {name} {then}, and not {now}; expected the same model, options and "
                        "release of Keepgate, or that folder to be deleted"
                    )
        elif any(child.name not in _EMPTY_STATE for child in path.iterdir()):
            raise ModelError(f"{path}: holds something else than a quantisation that was begun; expected it to be gone")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder. Raises ModelError if another process holds the lock."""
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ModelError(f"{self.path}: another process is working here") from error
            self._write_text(_MADE_OF, json.dumps(self._made_of, indent=2))
            yield

    def delete(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def finished_layers(self, calibrated: bool) -> int:
        """Number of finished layers."""
        if calibrated:
            places = [int(path.stem.removeprefix("windows-")) for path in self.path.glob("windows-*.pt")]
            return max(places, default=0)
        count = 0
        while (self.path / _layer_file(count)).is_file():
            count += 1
        return count

    def keep(self, index: int, layer: QuantizedLayer, windows: Windows | None) -> None:
        """Saves a finished layer and its output windows."""
        self._write(_layer_file(index), layer)
        if windows is not None:
            self._write(_windows_file(index + 1), windows)
            (self.path / _windows_file(index)).unlink(missing_ok=True)

    def layer(self, index: int) -> QuantizedLayer:
        """A saved layer. Raises ModelError if its file is damaged or missing."""
        return self._read(_layer_file(index), QuantizedLayer)

    def windows(self, before: int) -> Windows:
        """The input windows of a layer. Raises ModelError if their file is damaged or missing."""
        return self._read(_windows_file(before), Windows)

    def measured(self) -> list[Sensitivity] | None:
        """The saved sensitivities; None: none yet. Raises ModelError if their file is damaged."""
        path = self.path / _MEASURED
        if not path.is_file():
            return None
        try:
            return [Sensitivity(**values) for values in read_json_object(path)["groups"]]
        except (KeyError, TypeError) as error:
            raise ModelError(f"{path}: holds no sensitivities; expected {self.path} to be deleted") from error

    def keep_measured(self, sensitivities: Sequence[Sensitivity]) -> None:
        """Saves sensitivities."""
        groups = [dataclasses.asdict(sensitivity) for sensitivity in sensitivities]
        self._write_text(_MEASURED, json.dumps({"groups": groups}))

    def _write(self, name: str, what: QuantizedLayer | Windows) -> None:
        buffer = io.BytesIO()
        torch.save(what, buffer)
        self._write_bytes(name, buffer.getbuffer())

    def _write_text(self, name: str, text: str) -> None:
        self._write_bytes(name, memoryview(text.encode()))

    def _write_bytes(self, name: str, content: memoryview) -> None:
        work = self.path / f".{name}"
        try:
            work.write_bytes(content)
            os.replace(work, self.path / name)
        except OSError as error:
            work.unlink(missing_ok=True)
            raise ModelError(f"{self.path / name}: cannot be written ({error})") from error

    def _read(self, name: str, kind: type[_Kept]) -> _Kept:
        path = self.path / name
        try:
            # Loads only these classes and tensors: a foreign file cannot run code.
            with torch.serialization.safe_globals(_CLASSES):
                read = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ModelError(f"{path}: cannot be read; expected {self.path} to be deleted ({error})") from error
        if not isinstance(read, kind):
            raise ModelError(f"{path}: holds no {kind.__name__}; expected {self.path} to be deleted")
        return read


class SavedLinears(Mapping[str, QuantizedLinear]):
    """The quantised matrices of a folder by their full names, one layer in memory at a time."""

    def __init__(self, folder: PartialCheckpoint, layers: int) -> None:
        self._folder = folder
        self._places: dict[str, tuple[int, str]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        """Other changed tensors, by full name."""
        self.reports: list[LayerReport] = []
        for index in range(layers):
            kept = folder.layer(index)
            at = f"model.layers.{index}"
            self._places.update({f"{at}.{name}": (index, name) for name in kept.linears})
            self.tensors.update({f"{at}.{name}": tensor for name, tensor in kept.tensors.items()})
            self.reports.append(kept.report)
        self._loaded: tuple[int, QuantizedLayer] | None = None

    def __getitem__(self, name: str) -> QuantizedLinear:
        index, within = self._places[name]
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = index, self._folder.layer(index)
        return self._loaded[1].linears[within]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _layer_file(index: int) -> str:
    return f"layer-{index:05}.pt"


def _windows_file(index: int) -> str:
    return f"windows-{index:05}.pt"


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Names of differing entries, with both values; objects are compared entry by entry."""
    for name in {**now, **before}:
        one, other = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from ((f"{name}: {inner}", then, later) for inner, then, later in _differences(one, other))
        elif one != other:
            yield name, one, other
