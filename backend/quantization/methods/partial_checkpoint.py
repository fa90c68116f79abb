"""The folder of a quantisation that is not finished: one killed half way goes on from the last whole layer.

    made-of.json          model, method and options; another set of them may not go on here
    layer-00007.pt        what is kept of a layer
    windows-00008.pt      calibration windows in front of the next layer, where there are any
    sensitivities.json    what mixed precision chooses by

Each file is written beside and renamed: it is whole, or not there.
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
"""What no sensitivity depends on, so that it may be another one as long as there is no layer."""
_NOTHING_YET = ("lock", f".{_MADE_OF}")
"""What a folder may hold that was killed before it said what it is of."""


class PartialCheckpoint:
    """What has been finished of a quantisation.

    Args:
        path: of the folder; it is made if it is not there.
        made_of: JSON values by name; of what is made here, and how.

    Raises:
        ModelError: the folder is of something else, or cannot be used; the message says what differs.
    """

    def __init__(self, path: Path, made_of: Mapping[str, Any]) -> None:
        self.path = path
        self._made_of = made_of = json.loads(json.dumps(made_of))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"{path}: cannot be made ({error})") from error
        if (path / _MADE_OF).is_file():
            may_differ = () if any(path.glob("layer-*.pt")) else _BUDGET
            for name, then, now in _differences(read_json_object(path / _MADE_OF), made_of):
                if name not in may_differ:
                    raise ModelError(
                        f"{path}: was begun with {name} {then}, and not {now}; expected the same model, options and "
                        "release of Keepgate, or that folder to be deleted"
                    )
        elif any(child.name not in _NOTHING_YET for child in path.iterdir()):
            raise ModelError(f"{path}: holds something else than a quantisation that was begun; expected it to be gone")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from working here. Raises ModelError where one does already."""
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ModelError(f"{self.path}: another process is working here") from error
            self._write_text(_MADE_OF, json.dumps(self._made_of, indent=2))
            yield

    def delete(self) -> None:
        """Removes the folder: nothing is left to go on from."""
        shutil.rmtree(self.path, ignore_errors=True)

    def finished_layers(self, calibrated: bool) -> int:
        """How many layers are there to go on from."""
        if calibrated:
            places = [int(path.stem.removeprefix("windows-")) for path in self.path.glob("windows-*.pt")]
            return max(places, default=0)
        count = 0
        while (self.path / _layer_file(count)).is_file():
            count += 1
        return count

    def keep(self, index: int, layer: QuantizedLayer, windows: Windows | None) -> None:
        """A layer that is finished, and the windows behind it."""
        self._write(_layer_file(index), layer)
        if windows is not None:
            self._write(_windows_file(index + 1), windows)
            (self.path / _windows_file(index)).unlink(missing_ok=True)

    def layer(self, index: int) -> QuantizedLayer:
        """A layer that was kept. Raises ModelError where its file is damaged or gone."""
        return self._read(_layer_file(index), QuantizedLayer)

    def windows(self, before: int) -> Windows:
        """The windows in front of a layer. Raises ModelError where their file is damaged or gone."""
        return self._read(_windows_file(before), Windows)

    def measured(self) -> list[Sensitivity] | None:
        """What `keep_measured` was given; None: nothing yet. Raises ModelError where its file is damaged."""
        path = self.path / _MEASURED
        if not path.is_file():
            return None
        try:
            return [Sensitivity(**values) for values in read_json_object(path)["groups"]]
        except (KeyError, TypeError) as error:
            raise ModelError(f"{path}: holds no sensitivities; expected {self.path} to be deleted") from error

    def keep_measured(self, sensitivities: Sequence[Sensitivity]) -> None:
        """What mixed precision chooses by."""
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
            # Nothing but these classes and tensors: a file from elsewhere cannot run code.
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
        """What else has changed, by full name."""
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
    """Names of what is not the same, with its two values; within an object, of its own entries."""
    for name in {**now, **before}:
        one, other = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from ((f"{name}: {inner}", then, later) for inner, then, later in _differences(one, other))
        elif one != other:
            yield name, one, other
