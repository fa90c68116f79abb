"""The compiled encoder beside ONNX Runtime: whether it is still worth its lines on this processor.

As a program it measures, in a process of its own: `python -m benchmarks.semantic.encoders ROUNDS`.
"""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import onnxruntime
import torch
from tokenizers import Tokenizer
from transformers import BertModel

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, run_on_subject_core
from benchmarks.semantic.intent_data import banking77
from cache.semantic.embedding.encoder import Encoder, Vectors, unit
from cache.semantic.embedding.errors import NativeUnavailable
from cache.semantic.embedding.load import check_against_reference
from cache.semantic.embedding.model_files import ModelFiles, find_model, models_folder
from cache.semantic.embedding.native.encoder import NativeEncoder

_WORDS = 12
_CALLS = {1: 40, 8: 8, 32: 3}
"""Of each encoder in a round, by texts of a call."""
_ROUNDS = 30
_BUILDS = {"as this processor is": "", "without VNNI": "-mno-avx512vnni", "with AVX2 alone": "-mno-avx512f"}
"""Flags of the compiler, after -march=native."""
_METHOD = """\
The compiled encoder of all-MiniLM-L6-v2, as the semantic cache has it, and the model as torch exports it on ONNX
Runtime, in one process on one core, with one thread each. They compute the same questions of Banking77 in turn, those
of twelve words (fifteen tokens in the median), tokenizer included. A round's figure is the median of ONNX Runtime's
times divided by that of the compiled one, so that other load on the machine is in both. The latter is also built
for processors that lack VNNI, or AVX-512 altogether, while ONNX Runtime has the use of all that there is. The compiled
encoder stays while it wins by 1.3 for one text."""


class Measured(msgspec.Struct):
    """Milliseconds of the median call of each round."""

    build: str
    texts: int
    compiled: list[float]
    onnx: list[float]


async def measure(quick: bool) -> Figure:
    said = await run_on_subject_core("benchmarks.semantic.encoders", "2" if quick else str(_ROUNDS))
    rows = []
    for found in msgspec.json.decode(said, type=list[Measured]):
        pairs = list(zip(found.compiled, found.onnx, strict=True))
        rows.append(
            Row(
                what=f"{found.build}, texts of a call: {found.texts}; ONNX Runtime's time over the compiled encoder's",
                unit="",
                rounds=tuple(other / ours for ours, other in pairs),
                target=Target("least", 1.3) if found.texts == 1 else None,
                beside=tuple({"compiled, ms": round(a, 3), "ONNX Runtime, ms": round(b, 3)} for a, b in pairs),
            )
        )
    return Figure(figure="encoders", title="The compiled encoder", method=_METHOD, rows=tuple(rows))


def measure_here(rounds: int) -> list[Measured]:
    """Raises CannotMeasure where the compiled encoder does not serve."""
    files = find_model("default")
    compiled = dict(_builds(files))
    onnx = _OnnxEncoder(files)
    questions = [text for text in banking77("test").texts if len(text.split()) == _WORDS]
    measured = []
    for texts, calls in _CALLS.items():
        batches = [[questions[(texts * call + i) % len(questions)] for i in range(texts)] for call in range(calls)]
        for build, encoder in compiled.items():
            found = Measured(build, texts, [], [])
            for _ in range(rounds):
                found.compiled.append(_median_milliseconds(encoder, batches))
                found.onnx.append(_median_milliseconds(onnx, batches))
            measured.append(found)
    return measured


def _builds(files: ModelFiles) -> Iterator[tuple[str, NativeEncoder]]:
    """The compiled encoder for each kind of processor that this one can stand for."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotMeasure("The compiled encoder is needed, and no C++ compiler (g++, or what CXX names) is on PATH.")
    names = set[str]()
    for build, flag in _BUILDS.items():
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, CXX=f"{folder}/g++"):
            script = Path(folder, "g++")
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" {flag}\n', encoding="utf-8")
            script.chmod(0o755)
            try:
                encoder = NativeEncoder(files, Path(folder))
                check_against_reference(encoder, files, models_folder())
            except NativeUnavailable as error:
                raise CannotMeasure(f"The compiled encoder is needed: {error}") from error
            (library,) = Path(folder).glob("*.so")
            if library.name not in names:  # its digest is of the instructions: without AVX-512 all three are one
                names.add(library.name)
                yield build, encoder


class _OnnxEncoder:
    """The model on ONNX Runtime, exported by torch."""

    def __init__(self, files: ModelFiles) -> None:
        self.name, self.fingerprint, self.dimensions = f"{files.name}, ONNX Runtime", "", 384
        self._tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
        self._tokenizer.enable_padding()
        model = BertModel.from_pretrained(files.folder, local_files_only=True)  # does not train unless told to
        sample = (torch.ones((2, 9), dtype=torch.int64), torch.ones((2, 9), dtype=torch.int64))
        any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "model.onnx"))
            torch.onnx.export(
                model, sample, path, dynamo=True, verbose=False, input_names=["input_ids", "attention_mask"],
                dynamic_shapes=(any_size, any_size),
            )  # fmt: skip
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def encode(self, texts: list[str]) -> Vectors:
        tokens = self._tokenizer.encode_batch(texts)
        mask = np.array([each.attention_mask for each in tokens], np.int64)
        inputs = {"input_ids": np.array([each.ids for each in tokens], np.int64), "attention_mask": mask}
        rows = self._session.run(None, inputs)[0]
        return unit((rows * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True))


def _median_milliseconds(encoder: Encoder, batches: list[list[str]]) -> float:
    took = []
    for batch in batches:
        began = time.perf_counter()
        encoder.encode(batch)
        took.append(1000 * (time.perf_counter() - began))
    return float(np.median(took))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.semantic.encoders")
    parser.add_argument("rounds", type=int)
    sys.stdout.buffer.write(msgspec.json.encode(measure_here(parser.parse_args().rounds)))
