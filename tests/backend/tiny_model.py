"""A random model of two layers, small enough to compute hundreds of schedules in a second."""

from __future__ import annotations

import dataclasses
import functools
import json
import string
from dataclasses import dataclass, field
from typing import Any

import torch

from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.engine.output_processor import Output
from backend.engine.sequence import NO_TENANT, SamplingParams, Sequence, TokenLogprobs
from backend.model_loader.weights import ModelWeights, dense
from backend.models.config import ModelConfig
from backend.runners.fused.layout import KVPrecision
from backend.runners.fused.runner import FusedRunner
from backend.runners.torch.runner import TorchRunner
from backend.text.detokenizer import Detokenizer, TokenBytes
from prefix_store.identity.keys import KeyChain
from prefix_store.identity.salts import tenant_salt
from tests.backend.conftest import built_library
from tests.backend.engine.shelf import Shelf
from tests.backend.runners.cuda.random_model import random_weights
from tests.backend.runners.fused_schemes import kept
from tests.backend.speculation.drafting import VOCABULARY

SPELLED = 320
"""Tokens that have a text: those of this model, and of the others that tests make."""
CONTEXT = 256
END = 3
_OF_SEQUENCE = ("priority", "deadline", "keys", "pooled", "constraint", "prediction")
POISON = 5
"""A token whose embedding is not a number: whatever attends to it is not a number either."""
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=160,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(END,),
)


@functools.cache
def weights() -> ModelWeights:
    """The same random weights in each run, with a head whose greedy choices are clear."""
    made = random_weights(CONFIG, seed=11)
    made.embedding[POISON] = torch.nan
    return dataclasses.replace(made, head=4 * dense(made.head))


def fused(num_blocks: int, precision: str = "float16", kv_precision: KVPrecision = "float16") -> ModelRunner:
    """The runner that promises the same bits in any schedule, with weights in such schemes (`fused_schemes.NAMES`)."""
    return FusedRunner(built_library(), CONFIG, kept(weights(), precision), num_blocks, CONTEXT, 1, kv_precision)


def reference(num_blocks: int) -> ModelRunner:
    """The torch runner, which is not deterministic across schedules."""
    return TorchRunner(CONFIG, weights(), num_blocks, CONTEXT)


@functools.cache
def token_bytes() -> TokenBytes:
    """Two letters for each token."""
    letters = string.ascii_letters
    vocabulary = {letters[n // 40] + letters[n % 40]: n for n in range(SPELLED)}
    return TokenBytes(json.dumps({"model": {"vocab": vocabulary}, "decoder": {"type": "ByteLevel"}}), SPELLED)


@dataclass
class Completion:
    """The outputs of a sequence so far."""

    sequence: Sequence
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Output | None = None

    @property
    def content(self) -> tuple[str, list[TokenLogprobs], object]:
        """Everything that must not depend on the schedule, to the last bit."""
        return self.text, self.logprobs, self.last and self.last.finish_reason


def keys_of(tenant: str) -> KeyChain:
    """The block keys of a tenant; those without a tenant for an empty name."""
    return KeyChain(bytes(16), BLOCK_SIZE, tenant_salt(b"a secret of the tests", tenant)) if tenant else NO_TENANT


class EngineClient:
    """Feeds an engine and keeps its outputs."""

    def __init__(self, engine: Engine, shelf: Shelf | None = None) -> None:
        self.engine = engine
        self.shelf = shelf
        self.completions: dict[int, Completion] = {}

    def submit(self, number: int, prompt: list[int], answer: int = 8, **options: Any) -> Sequence:
        """Queues a greedy request; ``options`` of a sequence, or of its sampling parameters, or its ``tenant``."""
        own = {key: options.pop(key) for key in _OF_SEQUENCE if key in options}
        if tenant := options.pop("tenant", ""):
            own["keys"] = keys_of(tenant)
        params = SamplingParams(**{"max_tokens": answer, "temperature": 0.0, "logprobs": 2, **options})
        sequence = Sequence(number, prompt, params, Detokenizer(token_bytes()), number, **own)
        self.completions[number] = Completion(sequence)
        if self.shelf is not None:
            self.shelf.ask(sequence)
        self.engine.add(sequence)
        return sequence

    def step(self) -> list[Output]:
        """One step, followed by an integrity check."""
        outputs = self.engine.step()
        for output in outputs:
            completion = self.completions[output.sequence_id]
            assert completion.last is None or completion.last.finish_reason is None, "nothing follows an end"
            completion.text += output.text
            completion.logprobs += output.logprobs
            completion.last = output
        assert self.engine.problems() == []
        if self.shelf is not None:
            self.shelf.turn()
            assert self.engine.problems() == []
        return outputs

    def run(self) -> None:
        """Steps until nothing is left."""
        while self.engine.has_work:
            self.step()
        if self.shelf is not None:
            self.shelf.finish()
        assert self.engine.pool.num_free == self.engine.pool.num_blocks


def alone(runner: ModelRunner, prompt: list[int], answer: int = 8, *, number: int = 0, **options: Any) -> Completion:
    """The completion of a request with this number, and so this seed, that shares nothing and is computed alone in the
    largest possible steps.
    """
    client = EngineClient(Engine(runner, max_batch=1, step_tokens=CONTEXT, shares_prefixes=False))
    client.submit(number, prompt, answer, **options)
    client.run()
    return client.completions[number]
