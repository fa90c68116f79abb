"""Quantises a model directory into another one."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from backend.checkpoints.quantized.writer import write_checkpoint
from backend.checkpoints.tensor_store import TensorStore
from backend.errors import ModelError
from backend.model_loader.linears import linears
from backend.model_loader.source import REPORT_FILE, source_files
from backend.model_loader.weights import ModelWeights, load_weights, read_config
from backend.models.config import ModelConfig
from backend.quantization.calibration.decoder_layer import DecoderLayer, ExpertNames
from backend.quantization.calibration.divergence import Predictions
from backend.quantization.methods.awq import ActivationScaling
from backend.quantization.methods.layerwise import LayerQuantizer, Windows
from backend.quantization.methods.partial_checkpoint import PartialCheckpoint, SavedLinears
from backend.quantization.methods.recipe import Bits, Recipe
from backend.quantization.methods.report import Divergence, QuantizationReport
from backend.quantization.methods.sensitivity import Probe, Sensitivity
from backend.quantized_weights.float_scheme import FloatScheme
from backend.quantized_weights.quantized_linear import CannotQuantize

Progress = Callable[[str], None]

_SENSITIVITY_WINDOWS = 32
"""Calibration windows that measure sensitivities."""
_PROBED_WINDOWS = 2
"""Of these, those that run to the predictions for each group of matrices."""
_REFERENCE_WINDOWS = 4
"""Windows that also run through the unquantised model, to measure drift and divergence."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation of one model.

    Args:
        source: directory of the unquantised model.
        out: the directory to create.
        recipe: method and options.
        tokens: calibration windows int64 [windows, T]; None: no calibration, enough to round to nearest.
    """

    source: Path
    out: Path
    recipe: Recipe
    tokens: torch.Tensor | None

    @torch.inference_mode()
    def run(self, progress: Progress) -> QuantizationReport:
        """Writes the directory, with a report in it. It appears when it is complete.

        If it is killed and run again with the same arguments, it resumes after the last layer in ``OUT.partial``.

        Raises:
            ModelError: the model cannot be read or quantised, or a file cannot be written; one line.
        """
        check_new(self.out)
        config = read_config(self.source)
        weights = load_weights(self.source, config)
        _check_plain(self.source, weights)
        left = FloatScheme("float16" if weights.embedding.dtype == torch.float16 else "bfloat16")
        resolved = replace(self, out=self.out.resolve(), recipe=replace(self.recipe, left=left))
        return resolved._run(config, weights, progress)

    def _run(self, config: ModelConfig, weights: ModelWeights, progress: Progress) -> QuantizationReport:
        model = _Model(config, weights, ExpertNames.of(TensorStore(self.source)))
        self.recipe.check_budget(model.shapes)
        folder = PartialCheckpoint(self.out.with_name(f"{self.out.name}.partial"), self._made_of())
        with folder.locked():
            bits, sensitivities = self._chosen(model, folder, progress)
            try:
                windows = self._layers(model, folder, bits, progress)
                return self._written(model, folder, windows, sensitivities, progress)
            except CannotQuantize:  # a resumed run would fail the same way
                folder.delete()
                raise

    def _chosen(
        self, model: _Model, folder: PartialCheckpoint, progress: Progress
    ) -> tuple[Bits | None, tuple[Sensitivity, ...]]:
        """Bits of each group, and the sensitivities; None and () for other methods than mixed."""
        if self.recipe.method != "mixed" or self.tokens is None:
            return None, ()
        measured = folder.measured()
        if measured is None:
            predictions = Predictions(model.config, model.weights)
            probe = Probe(self.recipe.rounding, self.recipe.forms, predictions, model.layer, model.config.num_layers)
            spread = torch.linspace(0, len(self.tokens) - 1, min(len(self.tokens), _SENSITIVITY_WINDOWS)).long()
            measured = probe.measure(model.embedded(self.tokens[spread]).hidden, _PROBED_WINDOWS, progress)
            folder.keep_measured(measured)
        return self.recipe.choose(measured, sum(map(math.prod, model.shapes))), tuple(measured)

    def _layers(
        self, model: _Model, folder: PartialCheckpoint, bits: Bits | None, progress: Progress
    ) -> Windows | None:
        """Quantises the unfinished layers; returns the last one's output windows."""
        first, count = folder.finished_layers(self.tokens is not None), model.config.num_layers
        windows = None
        if self.tokens is not None:
            windows = folder.windows(first) if first else model.embedded(self.tokens)
        quantizer = LayerQuantizer(self.recipe.rounding, self.recipe.schemes(bits), self._fold(model))
        if first:
            progress(f"{first} of {count} layers are there from before")
        for index in range(first, count):
            layer = model.layer(index)
            kept = quantizer.uncalibrated(layer) if windows is None else quantizer.calibrated(layer, windows)
            folder.keep(index, kept, windows)
            drift = "" if kept.report.drift is None else f", drift {kept.report.drift:.4f}"
            progress(f"layer {index + 1} of {count}: {kept.report.seconds:.1f} s{drift}")
        return windows

    def _fold(self, model: _Model) -> ActivationScaling | None:
        if self.recipe.method != "awq":
            return None
        return ActivationScaling(model.config, self.recipe.scheme, model.names, model.weights.embedding.dtype)

    def _written(
        self,
        model: _Model,
        folder: PartialCheckpoint,
        windows: Windows | None,
        sensitivities: tuple[Sensitivity, ...],
        progress: Progress,
    ) -> QuantizationReport:
        kept = SavedLinears(folder, model.config.num_layers)
        divergence = None if windows is None else model.divergence(windows)
        report = QuantizationReport(self._made_of(), tuple(kept.reports), divergence, sensitivities)
        progress(f"writing {self.out}")
        checkpoint = folder.path / "checkpoint"
        for unfinished in (checkpoint, *folder.path.glob(f".{checkpoint.name}-*")):
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed while writing
        write_checkpoint(checkpoint, self.source, kept, kept.tensors)
        try:
            (checkpoint / REPORT_FILE).write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
            os.rename(checkpoint, self.out)
        except OSError as error:
            shutil.rmtree(checkpoint, ignore_errors=True)
            raise ModelError(f"{self.out}: cannot be written ({error})") from error
        folder.delete()
        return report

    def _made_of(self) -> dict[str, Any]:
        calibration = None
        if self.tokens is not None:
            digest = xxhash.xxh3_128_hexdigest(self.tokens.contiguous().numpy().tobytes())
            calibration = {"windows": len(self.tokens), "window_tokens": self.tokens.shape[1], "digest": digest}
        model = {"model": str(self.source.resolve()), "files": source_files(self.source)}
        return {**model, **self.recipe.provenance(), "calibration": calibration}


def check_new(out: Path) -> None:
    """Raises ModelError unless ``out`` is absent, or an empty directory that can be replaced."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out}: is there already; expected a new directory")
    if out.resolve().is_mount():
        raise ModelError(f"{out}: something is mounted there; expected a new directory, which may be in it")


def _check_plain(source: Path, weights: ModelWeights) -> None:
    """Raises ModelError where a weight is quantised."""
    for name, weight in {**linears(weights), "lm_head": weights.head}.items():
        if not isinstance(weight, torch.Tensor):
            raise ModelError(f"{source}: {name}.weight is quantised already; expected the model that it was made of")


@dataclass(frozen=True, slots=True)
class _Model:
    config: ModelConfig
    weights: ModelWeights
    names: ExpertNames

    def layer(self, index: int) -> DecoderLayer:
        return DecoderLayer(self.config, index, self.weights.layers[index], self.names)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(out, in) of all linear layers but the head."""
        return [(weight.shape[0], weight.shape[1]) for weight in linears(self.weights).values()]

    def embedded(self, tokens: torch.Tensor) -> Windows:
        hidden = self.weights.embedding[tokens].float() * self.config.embedding_scale
        return Windows(hidden, hidden[:_REFERENCE_WINDOWS].clone())

    def divergence(self, windows: Windows) -> Divergence:
        """Between outputs of the last layer."""
        expected, got = windows.reference, windows.hidden[: len(windows.reference)]
        ((kl, top1),) = Predictions(self.config, self.weights).divergences(expected, [got])
        return Divergence(expected.shape[:2].numel(), kl, top1)
