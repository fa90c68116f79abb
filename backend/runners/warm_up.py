"""First steps on a new runner, so that memory is mapped and kernels are chosen before the first request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, StepInput, pack
from backend.engine.sequence import SamplingParams, Sequence
from backend.text.detokenizer import Detokenizer, TokenBytes

# While the last one runs, steps cannot be launched ahead; it ends first.
_PARAMS = (
    SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, ignore_eos=True),
    SamplingParams(max_tokens=1, temperature=1.0, presence_penalty=1.0, logprobs=1, ignore_eos=True),
)


def warm_up(runner: ModelRunner, token_bytes: TokenBytes, max_context: int) -> None:
    """Answers a few short prompts with an engine of its own: prefill, decode, and every way to sample.

    The KV blocks it writes are never read: the server's engine starts with an empty prefix cache.

    Args:
        max_context: positions that the runner was made for; at least 2.
    """
    room = min(max_context, runner.num_blocks * BLOCK_SIZE)
    prompt = [0] * max(1, min(2 * BLOCK_SIZE, room - max(p.max_tokens for p in _PARAMS)))
    engine = Engine(runner, len(_PARAMS), None, shares_prefixes=False)
    for index, params in enumerate(_PARAMS):
        fitting = replace(params, max_tokens=min(params.max_tokens, room - len(prompt)))
        engine.add(Sequence(index, prompt, fitting, Detokenizer(token_bytes), index))
    while engine.has_work:
        engine.step()


def single_sequence_step(token_ids: np.typing.NDArray[np.int32], start: int) -> StepInput:
    """A step of one sequence that owns the first blocks; logits of every row are wanted."""
    count = len(token_ids)
    blocks = range((start + count - 1) // BLOCK_SIZE + 1)
    return pack([SequenceRows(token_ids.tolist(), start, blocks)], range(count))
