"""Writes a sentence-transformers model as an ONNX graph: a program, run once for a model.

    python -m cache.semantic.embedding.export NAME MODEL_FOLDER TARGET_FOLDER [--prompt=TEXT]

It traces the library's own chain of modules (transformer, pooling, dense layers, normalisation), so that there is no
second description of them that could be wrong. For a model that cannot be traced it writes a file with the reason.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from cache.semantic.embedding.encoder import unit
from cache.semantic.embedding.errors import ModelUnusable
from cache.semantic.embedding.manifest import (
    MODEL_FILE,
    REFERENCE_FILE,
    REFUSAL_FILE,
    TOKENIZER_FILE,
    Manifest,
    write_manifest,
)
from cache.semantic.embedding.model_files import ModelFiles
from cache.semantic.embedding.reference import reference_texts
from cache.semantic.embedding.torch_encoder import open_model

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_ABOUT_INPUTS = {"modality", "prompt_length"}
_SAMPLE = ["short", "a text of some more words", "and one that is longer than both of them together"]
# Tokenizers without a limit of their own report 1e30.
_NO_LIMIT = 10**9


class NotExportable(Exception):
    """A model that only its own library can compute; the message says why."""


class Pipeline(torch.nn.Module):
    """All modules of a model as a function of tensors: int64 [batch, tokens] each, to float32 [batch, dimensions]."""

    def __init__(self, model: SentenceTransformer, names: list[str], constants: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._names = names
        self._constants = constants

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        features = dict(zip(self._names, tensors, strict=True)) | self._constants
        vectors: torch.Tensor = self.model(features)["sentence_embedding"]
        return vectors[:, : self.model.truncate_dim] if self.model.truncate_dim else vectors


def export(files: ModelFiles, target: Path) -> None:
    """Write the exported files of a model into an empty folder.

    Raises ModelUnusable, and OSError if they cannot be written.
    """
    model = open_model(files)
    try:
        _export(model, target)
    except NotExportable as refusal:
        (target / REFUSAL_FILE).write_text(str(refusal), "utf-8")


def _export(model: SentenceTransformer, target: Path) -> None:
    prompt = model.prompts.get(model.default_prompt_name or "") or ""
    features = model.preprocess(_SAMPLE, prompt=prompt)
    names = [name for name in features if name in _INPUTS]
    constants = {name: value for name, value in features.items() if name in _ABOUT_INPUTS}
    foreign = sorted(set(features) - set(names) - set(constants))
    if foreign or constants.get("modality", "text") != "text" or "input_ids" not in names:
        raise NotExportable(f"its modules read more than the tokens of a text: {foreign or constants or names}")
    if not isinstance(getattr(model.tokenizer, "backend_tokenizer", None), Tokenizer):
        raise NotExportable(f"its tokenizer {type(model.tokenizer).__name__} is not of the library tokenizers")

    # The graph last, since it takes a minute: a full disk fails before.
    manifest = write_description(model, names, prompt, target)
    _write_graph(Pipeline(model, names, constants), [features[name] for name in names], names, target / MODEL_FILE)
    write_manifest(target, manifest)


def write_description(model: SentenceTransformer, inputs: list[str], prompt: str, target: Path) -> Manifest:
    """Writes tokenizer, of the library tokenizers, and reference of a model. Returns their manifest."""
    tokenizer = model.tokenizer
    _write_tokenizer(tokenizer.backend_tokenizer, target / TOKENIZER_FILE)
    longest = model.max_seq_length if (model.max_seq_length or _NO_LIMIT) < _NO_LIMIT else None
    texts = reference_texts(longest)
    vectors = model.encode(texts, batch_size=1, show_progress_bar=False)
    np.save(target / REFERENCE_FILE, unit(np.asarray(vectors, np.float32)))
    return Manifest(
        inputs=inputs,
        longest=longest,
        cuts_left=tokenizer.truncation_side == "left",
        prompt=prompt,
        pad_id=tokenizer.pad_token_id or 0,
        pad_type_id=tokenizer.pad_token_type_id,
        pads_left=tokenizer.padding_side == "left",
        texts=texts,
    )


def _write_graph(pipeline: Pipeline, sample: list[torch.Tensor], names: list[str], path: Path) -> None:
    any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        program = torch.onnx.export(
            pipeline.eval(), tuple(sample), dynamo=True, verbose=False, input_names=names, output_names=["vectors"],
            dynamic_shapes=(tuple(any_size for _ in sample),),
        )  # fmt: skip
    # Tracing foreign code may raise any exception.
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise NotExportable(f"torch.onnx cannot export it: {reason}") from error
    if program is None:
        raise NotExportable("torch.onnx gave no program of it")
    program.save(path)


def _write_tokenizer(backend: Tokenizer, path: Path) -> None:
    # The library has set its lower-casing in this object; the reader of the file truncates and pads.
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    path.write_text(copy.to_str(), "utf-8")


def main() -> int:
    """Exports as the command line says; exit status 1 and a line on stderr if that fails."""
    parser = argparse.ArgumentParser(description="Write a sentence-transformers model as an ONNX graph.")
    parser.add_argument("name")
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("target", type=Path, metavar="TARGET_FOLDER")
    parser.add_argument("--prompt", help="is put before every text, in place of the model's own")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        export(ModelFiles(arguments.name, arguments.model, arguments.prompt), arguments.target)
    except (ModelUnusable, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
