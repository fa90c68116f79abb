"""What each way to keep weights in fewer bits loses on text, and what it takes."""

import asyncio
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.config import EngineConfig
from backend.engine.model_runner import ModelRunner
from backend.evaluation.perplexity import Loss, perplexity
from backend.evaluation.scores import Scores
from backend.model import load_model
from backend.model_loader.linears import linears
from backend.model_loader.source import ModelSource, resolve_model
from backend.model_loader.weights import ModelWeights, load_weights, read_config
from backend.models.config import ModelConfig
from backend.quantization.selection.prepared import RECIPES, prepared
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.names import Quantization
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import Scheme
from benchmarks.harness.measurement import RATIO, Figure, Row, Target
from benchmarks.harness.processes import cores
from benchmarks.quantization.wikitext_scores import (
    BF16,
    STRIDE,
    WINDOW,
    rise,
    rounded,
    runner_of_bits,
    scores_of,
    wikitext_tokens,
)

_TOKENS, _MANY_TOKENS, _QUICK_TOKENS = 8_192, 65_536, 512
_KV_MEMORY = 64 * 2**20
_SCHEMES: tuple[Scheme, ...] = (
    IntScheme(8),
    IntScheme(8, activation_bits=8),
    *(IntScheme(4, group) for group in (32, 64, 128)),
    *(IntScheme(4, group, "integer") for group in (64, 128)),
    IntScheme(4, 32, "minimum"),
    Fp8Scheme("row"),
    Fp8Scheme("tensor"),
    Nf4Scheme(),
    Nf4Scheme(double=False),
)
# Beside a method, rounding to the nearest in the scheme that it fills.
_SAME_SCHEME = {"gptq-int4": "int4-g128", "awq-int4": "int4-asym-g128"}
_MAX_RISE = {
    "int8": Target("most", 0.3),
    "--quantization int8": Target("most", 0.3),
    "mixed": Target("most", 2.0, aim=1.0),
    "--quantization mixed": Target("most", 2.0, aim=1.0),
}
_MAX_OF_ROUNDING = {"gptq-int4": Target("most", 0.5)}
_MAX_MEMORY = {
    "int8": Target("most", 0.53),
    "int4-g64": Target("most", 0.29),
    "int4-g128": Target("most", 0.29),
    "gptq-int4": Target("most", 0.29),
    "awq-int4": Target("most", 0.29),
    "mixed": Target("most", 5.5 / 16),
    "nf4": Target("most", 0.27),
}
_METHOD = """\
SmolLM2-135M-Instruct on the first {tokens:,} tokens of WikiText-2's test split, and on {many:,} where something is
promised of the rise; in windows of {window} with a stride of {stride}: each token is scored once, after at least
{least} others but for the first window's. Everything is compared with the same weights in bfloat16, over the same
tokens; their perplexity is {reference:.3f}, and {of_many:.3f} over the many. The matrices of the layers are rounded to
the nearest by each scheme; gptq-int4, awq-int4 and mixed are what `keepgate backend` makes under these names, with 128
windows of 512 tokens of the validation split. Embedding and head stay as they are, and what the bits say is multiplied
in half floats; in int8-dynamic activations are rounded as well. Groups of 128 are 64 where 128 does not divide the
inputs; the four bits of mixed are with zeros in groups of 32. Rows with --quantization are what is served under that
name on this machine: the head is rounded too, and the kernels may round activations. KL is the mean Kullback-Leibler
divergence from the next-token distribution of the reference, in nats, and top-1 how often both have the same first
choice. Memory is that of the rounded matrices with their scales, in units of bfloat16. The checkpoint was made from
4-bit weights with a scale and a minimum for groups of 32 (Q4_1): int4-min-g32, which --quantization int4 is, finds
these again and loses next to nothing, as it would on no other model."""


@dataclass(frozen=True, slots=True)
class _Subject:
    name: str
    runner: ModelRunner
    bits: float | None = None
    """For each weight in the matrices of the layers; None: that of the same name has it."""


async def measure(quick: bool) -> Figure:
    return await asyncio.to_thread(_measure, quick)


def _measure(quick: bool) -> Figure:
    os.sched_setaffinity(0, cores().all)  # of this thread, and of those that the runners start from it
    torch.set_num_threads(len(cores().all))
    count, many = (_QUICK_TOKENS, _QUICK_TOKENS) if quick else (_TOKENS, _MANY_TOKENS)
    source = resolve_model("default", lambda _: None)
    config = read_config(source.directory)
    weights = load_weights(source.directory, config)
    reference = runner_of_bits(config, rounded(weights, BF16))
    subjects = list(_subjects(source, config, weights, quick))
    tokens = wikitext_tokens(source, many)
    compared = [subject for subject in subjects if subject.name not in _MAX_RISE]
    promised = [subject for subject in subjects if subject.name in _MAX_RISE]
    of_reference, rows = _scored(tokens[: count + 1], reference, compared)
    of_many, more_rows = _scored(tokens, reference, promised)
    method = _METHOD.format(
        tokens=count,
        many=many,
        window=WINDOW,
        stride=STRIDE,
        least=WINDOW - STRIDE,
        reference=perplexity(of_reference),
        of_many=perplexity(of_many),
    )
    rows = [*more_rows, *rows]
    return Figure(figure="quantization_quality", title="What quantised weights lose", method=method, rows=tuple(rows))


def _scored(
    tokens: npt.NDArray[np.int32], reference: ModelRunner, subjects: list[_Subject]
) -> tuple[Scores, list[Row]]:
    """The reference's scores, and what is said of each subject beside it."""
    of_reference, *of_subjects = scores_of(tokens, reference, [subject.runner for subject in subjects])
    scored = {subject.name: scores for subject, scores in zip(subjects, of_subjects, strict=True)}
    return of_reference, [row for subject in subjects for row in _rows(subject, scored, of_reference)]


def _subjects(source: ModelSource, config: ModelConfig, weights: ModelWeights, quick: bool) -> Iterator[_Subject]:
    """Everything but the reference. What takes minutes to be made is left out in a quick run."""
    for scheme in _SCHEMES:
        packed = rounded(weights, scheme)
        runner = runner_of_bits(config, packed, rounds_activations=scheme.activation_bits < 16)
        yield _Subject(scheme.name, runner, _bits(packed))
    for name in () if quick else RECIPES:
        packed = load_weights(prepared(source, name, lambda _: None).directory, config)
        yield _Subject(name, runner_of_bits(config, packed), _bits(packed))
    for name in get_args(Quantization):
        if name not in ("none", "auto") and not (quick and name in RECIPES):
            engine = EngineConfig(
                kv_memory=_KV_MEMORY,
                max_batch=1,
                max_context=WINDOW,
                threads=len(cores().all),
                quantization=name,
                device="cpu",
            )
            yield _Subject(f"--quantization {name}", load_model(source, engine, lambda _: None).runner)


def _bits(packed: ModelWeights) -> float:
    """For each weight in the matrices of the layers; floats are those that a method has left in bfloat16."""
    matrices = list(linears(packed).values())
    taken = sum(2 * m.numel() if isinstance(m, torch.Tensor) else m.nbytes for m in matrices)
    return 8 * taken / sum(math.prod(matrix.shape) for matrix in matrices)


def _rows(subject: _Subject, scored: Mapping[str, Scores], reference: Scores) -> Iterator[Row]:
    name, scores = subject.name, scored[subject.name]
    loss = Loss.of(scores, reference)
    apart = scores.nll.astype(np.float64) - reference.nll
    beside: dict[str, float | str] = {
        "perplexity": perplexity(scores),
        "standard error of the rise in %": 100 * float(apart.std() / math.sqrt(len(apart))),
        "KL": loss.kl_mean,
        "KL of the worst hundredth": loss.kl_p99,
        "top-1": loss.top1_agreement,
    }
    if subject.bits is not None:
        beside["bits per weight"] = subject.bits
    yield Row(
        what=f"{name}: rise of the perplexity",
        unit="%",
        rounds=(rise(scores, reference),),
        target=_MAX_RISE.get(name),
        beside=(beside,),
    )
    if subject.bits is not None:
        yield Row(what=f"{name}: memory", unit=RATIO, rounds=(subject.bits / 16,), target=_MAX_MEMORY.get(name))
    if name in _SAME_SCHEME:
        yield Row(
            what=f"{name}: rise, against that of {_SAME_SCHEME[name]}",
            unit=RATIO,
            rounds=(rise(scores, reference) / rise(scored[_SAME_SCHEME[name]], reference),),
            target=_MAX_OF_ROUNDING.get(name),
        )
