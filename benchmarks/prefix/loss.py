"""What a prefix loses that was kept in one byte an element: the text after it, against the same after exact blocks."""

import asyncio
import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.model_loader.source import resolve_model
from backend.model_loader.weights import load_weights, read_config
from backend.runners.errors import RunnerUnavailable
from backend.runners.fused.build import load_fused_library
from backend.runners.fused.runner import FusedRunner
from backend.runners.warm_up import single_sequence_step
from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, cores
from prefix_store.codecs.codec import Codec
from prefix_store.codecs.registry import CODECS
from prefix_store.frames.segments import Segments

_TEXT = Path(__file__).resolve().parents[1] / "data" / "wikitext-2" / "test.txt.gz"
_PREFIX, _REST = 768, 256
_WINDOW = _PREFIX + _REST
_WINDOWS, _QUICK_WINDOWS = 40, 2
_METHOD = """\
SmolLM2-135M-Instruct in float16 on the first {windows} windows of {window} tokens of WikiText-2's test split, each a
sequence of its own. Of each the first {prefix} tokens are computed, their blocks written by a codec and read back, and
the {rest} tokens after them are computed on what came back. Perplexity is of those tokens, the geometric mean over all
windows ({exact:.2f} after exact blocks). KL is the mean Kullback-Leibler divergence from the next-token distribution
after exact blocks, in nats; top-1 is how often both have the same first choice; logits is the largest difference of a
logit from what it is after exact blocks, over the largest logit of its token. A round is a window."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Of one window and one codec."""

    surprise: float
    divergence: float
    top_1: float
    logits: float


async def measure(quick: bool) -> Figure:
    return await asyncio.to_thread(_measure, _QUICK_WINDOWS if quick else _WINDOWS)


def _measure(windows: int) -> Figure:
    os.sched_setaffinity(0, cores().all)  # of this thread, and of those that the runner starts from it
    runner, tokenizer = _runner()
    text = gzip.decompress(_TEXT.read_bytes()).decode()
    ids = np.array(tokenizer.encode(text[: windows * _WINDOW * 8]).ids[: windows * _WINDOW], dtype=np.int32)
    exact: list[float] = []
    losses: dict[str, list[Loss]] = {name: [] for name in CODECS}
    for window in np.split(ids, windows):
        runner.run(single_sequence_step(window[:_PREFIX], 0))
        segments = _segments(runner)
        numbers = [np.array(segment) for (segment,) in segments]
        expected = _rest(runner, window)
        exact.append(_surprise(expected, window))
        for name, codec in CODECS.items():
            for (segment,), content in zip(segments, numbers, strict=True):
                np.copyto(np.asarray(segment), content)
            _restore(runner, codec, segments)
            losses[name].append(_loss(expected, _rest(runner, window), window))
    rows = [row for name in CODECS for row in _rows(name, losses[name], exact)]
    method = _METHOD.format(
        windows=windows, window=_WINDOW, prefix=_PREFIX, rest=_REST, exact=float(np.exp(np.mean(exact)))
    )
    return Figure(figure="prefix_loss", title="What kept prefixes lose", method=method, rows=tuple(rows))


def _rows(name: str, losses: list[Loss], exact: list[float]) -> list[Row]:
    is_exact = CODECS[name].is_exact
    rise = float(np.exp(np.mean([loss.surprise for loss in losses]) - np.mean(exact)) - 1)
    beside = tuple(
        {
            "top-1": loss.top_1,
            "logits": loss.logits,
            "rise of perplexity": float(np.exp(loss.surprise - other) - 1),
        }
        for loss, other in zip(losses, exact, strict=True)
    )
    return [
        Row(
            what=f"{name}: rise of the perplexity after a prefix",
            unit="",
            rounds=(rise,),
            target=Target("most", 0.0) if is_exact else None,
        ),
        Row(
            what=f"{name}: KL after a prefix",
            unit="nats",
            rounds=tuple(loss.divergence for loss in losses),
            target=Target("most", 0.0) if is_exact else None,
            summary="maximum" if is_exact else "median",
            beside=beside,
        ),
    ]


def _runner() -> tuple[ModelRunner, Tokenizer]:
    source = resolve_model("default", lambda _: None)
    config = read_config(source.directory)
    weights = load_weights(source.directory, config)
    try:
        library = load_fused_library(lambda _: None)
        blocks = _WINDOW // BLOCK_SIZE
        runner = FusedRunner(library, config, weights, blocks, _WINDOW, len(cores().all))
    except RunnerUnavailable as reason:
        raise CannotMeasure(f"The fused step is not available: {reason}") from reason
    return runner, Tokenizer.from_file(str(source.directory / "tokenizer.json"))


def _segments(runner: ModelRunner) -> list[Segments]:
    blocks = runner.kv_blocks.outgoing(range(_PREFIX // BLOCK_SIZE)) if runner.kv_blocks is not None else None
    if blocks is None:
        raise CannotMeasure(f"{runner.name} does not let its KV memory be read.")
    return list(blocks.ready())


def _restore(runner: ModelRunner, codec: Codec, segments: list[Segments]) -> None:
    """Writes each block by a codec and reads it back in its place."""
    assert runner.kv_blocks is not None  # noqa: S101
    layout = runner.kv_blocks.layout
    payload = np.empty(codec.payload_bytes(layout), np.uint8)
    for block in segments:
        codec.encode(block, layout, payload)
        codec.decode(payload, layout, block)


def _rest(runner: ModelRunner, window: npt.NDArray[np.int32]) -> torch.Tensor:
    """Logits after each of the tokens that follow the prefix, float32 [tokens, vocabulary]."""
    return runner.run(single_sequence_step(window[_PREFIX:], _PREFIX)).logits.clone()


def _loss(expected: torch.Tensor, got: torch.Tensor, window: npt.NDArray[np.int32]) -> Loss:
    wanted, found = expected.log_softmax(-1), got.log_softmax(-1)
    return Loss(
        _surprise(got, window),
        float((wanted.exp() * (wanted - found)).sum(-1).mean()),
        float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
        float(((expected - got).abs().amax(-1) / expected.abs().amax(-1)).max()),
    )


def _surprise(logits: torch.Tensor, window: npt.NDArray[np.int32]) -> float:
    """Mean negative log-likelihood of the tokens after the prefix but the first, in nats."""
    following = torch.from_numpy(window[_PREFIX + 1 :]).long().unsqueeze(1)
    return float(-logits.log_softmax(-1)[:-1].gather(1, following).mean())
