"""State of one sequence: its prompt, the tokens generated so far, and how many of them are computed."""

from __future__ import annotations

import random
from collections import Counter, abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from backend.engine.block_pool import Match
from backend.engine.model_runner import BLOCK_SIZE
from backend.text.detokenizer import Detokenizer
from backend.text.stop_strings import StopStrings
from prefix_store.identity.keys import KeyChain

if TYPE_CHECKING:
    import torch

    from backend.engine.kv_connector import LoadRequest, StoredPrefix

NO_TENANT = KeyChain(bytes(16), BLOCK_SIZE)
"""Keys of sequences without a tenant, which share their blocks with each other."""


PREDICTION = "prediction"
"""The method of drafts that are taken from a sequence's ``prediction``."""


class FinishReason(Enum):
    """Why a sequence ended; the values are OpenAI's where there is one."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    EXPIRED = "expired"
    SHED = "shed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Zero and one are the neutral values, as in OpenAI's interface."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None: a random seed."""
    logprobs: int | None = None
    """Alternatives to report at each token (0: the chosen one alone); None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """Alternatives to report at each token of the prompt; None: no log-probabilities of the prompt."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer as the model's own end tokens do; their text is not part of it."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """Until so many tokens are generated, no end token is sampled and no stop string ends the answer."""

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the next logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's own distribution (before penalties and temperature)."""

    token_id: int
    logprob: float | None
    """None for a prompt's first token, which nothing precedes."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""
    rank: int = 0
    """Place of the token among all, from 1 for the most likely one; known for tokens of a prompt only."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence's last one. The next step computes them as if they did, and keeps those that it
    would have chosen itself (speculative decoding, arXiv 2211.17192)."""

    method: str
    """Which one proposed them, for metrics."""
    token_ids: tuple[int, ...]
    """At least one."""
    probabilities: npt.NDArray[np.float32] | None = None
    """[len(token_ids), vocab_size]: the distributions that the tokens were drawn from; None: they were not drawn, and
    each has probability 1. Only of a draft that does not branch."""
    parents: tuple[int, ...] = ()
    """For each token the index of the one that it follows, which comes before it; -1: the sequence's last token. Empty:
    the draft does not branch, and each token follows the one before it."""

    def shortened(self, length: int) -> Draft | None:
        """The first tokens; None: none are left."""
        if length >= len(self.token_ids):
            return self
        kept = None if self.probabilities is None else self.probabilities[:length]
        ids, parents = self.token_ids[:length], self.parents[:length]
        return Draft(self.method, ids, kept, parents) if length > 0 else None

    def following(self, index: int, token_id: int) -> int | None:
        """The index of this token where it follows the one at ``index``, -1: the sequence's last; None: it does not."""
        if not self.parents:
            after = index + 1
            return after if after < len(self.token_ids) and self.token_ids[after] == token_id else None
        for place in range(index + 1, len(self.token_ids)):
            if self.parents[place] == index and self.token_ids[place] == token_id:
                return place
        return None

    def path(self, token_ids: abc.Sequence[int]) -> list[int]:
        """The indices of the tokens that these begin with."""
        indices: list[int] = []
        for token_id in token_ids:
            index = self.following(indices[-1] if indices else -1, token_id)
            if index is None:
                break
            indices.append(index)
        return indices


class Constraint(Protocol):
    """A constraint on an answer, advanced token by token."""

    def allowed(self) -> torch.Tensor | None:
        """bool [vocab_size]: the tokens that may come next; None: all. Changes nothing."""
        ...

    def accept(self, token_id: int) -> None:
        """Advances by the token that was sampled."""
        ...


class Sequence:
    """One sequence. The scheduler moves ``num_computed`` and ``blocks``, the engine appends tokens.

    tokens:    p p p p p p p p g g g        p prompt, g generated
               └ num_computed ┘└ rest ┘     their keys and values are in ``blocks``

    If all layers of the model are windowed, the first ``first_block`` blocks have been released.

    Args:
        constraint: on the tokens of the answer; None: there is none.
        priority: smaller numbers go first.
        deadline: ``time.monotonic()`` seconds at which the sequence is ended; None: never.
        keys: makes the keys of its KV blocks; sequences of different tenants share no key.
        pooled: asks for the mean of the prompt's hidden states, and generates nothing.
        probes: asks for the logits of its next token; "fresh" ones are computed without the prefix cache.
        prediction: tokens of what the answer may turn out to be; they change how soon it comes, nothing else.
    """

    def __init__(
        self,
        sequence_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        detokenizer: Detokenizer,
        random_seed: int,
        *,
        constraint: Constraint | None = None,
        priority: int = 0,
        deadline: float | None = None,
        keys: KeyChain = NO_TENANT,
        pooled: bool = False,
        probes: Literal["fresh", "shared"] | None = None,
        prediction: abc.Sequence[int] = (),
    ) -> None:
        self.id = sequence_id
        self.tokens = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.num_computed = 0
        self.blocks: list[int] = []
        self.first_block = 0
        self.params = params
        self.logit_bias = (
            np.fromiter(params.logit_bias.keys(), np.int64),
            np.fromiter(params.logit_bias.values(), np.float32),
        )
        """Token ids and what is added to their logits, as arrays for every step."""
        self.detokenizer = detokenizer
        self.stop_strings = StopStrings(params.stop)
        self.end_tokens: list[int] = []
        """Tokens that end the answer, the model's and its own; set by the engine."""
        # A generator for this sequence alone, with one number for each generated token: samples do not depend on
        # the rest of the batch or on preemptions.
        self._random_seed = random_seed
        self.random = random.Random(random_seed)  # noqa: S311 - reproducible draws are the point
        self.output_counts: Counter[int] = Counter()
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.constraint = constraint
        self.priority = priority
        self.deadline = deadline
        self.keys = keys
        self.pooled = pooled
        self.probes = probes
        self.prediction = tuple(prediction)
        # Tokens of drafts that came from it, as the usage of an answer counts them.
        self.accepted_prediction = self.rejected_prediction = 0
        # State of the scheduler: place in the queue; keys of full blocks; their keys after a lossy restore and the
        # first block that has one; the last match in the prefix cache; registered blocks; prompt tokens that were
        # cached when the sequence first ran; what the prefix store has of it; and the running fetch.
        self.arrival = 0
        self.block_keys: list[bytes] = []
        self.lossy_keys: list[bytes] = []
        self.lossy_from: int | None = None
        self.match: Match | None = None
        self.num_registered = 0
        self.num_cached = 0
        self.prefix: StoredPrefix | None = None
        self.fetch: LoadRequest | None = None
        # Times of time.monotonic(), in seconds.
        self.queued_at = 0.0
        self.started_at: float | None = None

    @property
    def can_share(self) -> bool:
        """Whether it may use cached blocks: not if it needs the hidden state or logits of every token."""
        return not (self.pooled or self.params.prompt_logprobs is not None or self.probes == "fresh")

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that its blocks hold, the released ones included."""
        return (self.first_block + len(self.blocks)) * BLOCK_SIZE

    def slot(self, place: int) -> int:
        """Where the keys and values of the token at this place are: block * BLOCK_SIZE + offset."""
        return self.blocks[place // BLOCK_SIZE - self.first_block] * BLOCK_SIZE + place % BLOCK_SIZE

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def may_end(self) -> bool:
        """Whether it has its ``min_tokens``; an output constraint ends an answer without them."""
        return self.num_generated >= self.params.min_tokens or self.constraint is not None

    def append(self, token_id: int) -> None:
        """Adds one generated token."""
        self.tokens.append(token_id)
        self.output_counts[token_id] += 1
        if self.constraint is not None:
            self.constraint.accept(token_id)

    def rewind_rng(self) -> None:
        """Resets the generator to the number of the next token, after samples that were never appended."""
        self.random.seed(self._random_seed)
        if self.params.temperature > 0:
            for _ in range(self.num_generated):
                self.random.random()
