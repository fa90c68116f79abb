"""What the engine gets of a request: a sequence for each answer."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import Literal

import xxhash

from backend.chat.grammar import GrammarCompiler
from backend.chat.output_constraint import OutputConstraint
from backend.engine.sequence import SamplingParams, Sequence
from backend.errors import InvalidRequest
from backend.protocol import CommonFields
from backend.requests.sampling import in_range
from backend.text.detokenizer import Detokenizer, TokenBytes
from prefix_store.identity.keys import KeyChain

_PRIORITY_RANGE = 2**31

_sequence_ids = itertools.count()


@dataclass(frozen=True)
class GenerationRequest:
    """One request, ready for the engine: ``sequences`` are its choices in order."""

    sequences: list[Sequence]
    n: int
    """Answers to each prompt, which stand side by side in ``sequences``."""
    prompt_tokens: int
    """Tokens of all prompts; a prompt with several answers counts once."""
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool
    form: OutputConstraint | None = None
    """What the answers have to look like; None: any text."""


class SequenceFactory:
    """Makes sequences for one model.

    Args:
        most_sequences: prompts times ``n`` of one request, at most.
        takes_priority: whether a request may say that it is more, or less, urgent than others.
    """

    def __init__(
        self, token_bytes: TokenBytes, grammars: GrammarCompiler, most_sequences: int, takes_priority: bool
    ) -> None:
        self.most_sequences = most_sequences
        self._takes_priority = takes_priority
        self._token_bytes = token_bytes
        self._grammars = grammars

    def answers_of_each(self, request: CommonFields) -> int:
        """Answers to each prompt.

        Raises:
            InvalidRequest: names ``n``.
        """
        return int(in_range("n", request.n, 1, 1, self.most_sequences))

    def answers(
        self,
        request: CommonFields,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        continues_text: bool,
        echo: bool = False,
        form: OutputConstraint | None = None,
    ) -> GenerationRequest:
        """``n`` sequences for each prompt, from the fields that chats and completions have in common.

        Args:
            prompts: token ids of each.
            continues_text: whether answers are the prompt's text, going on.

        Raises:
            InvalidRequest: names the field.
        """
        _refuse_common_fields(request)
        n = self.answers_of_each(request)
        priority = self._priority(request.priority)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        visible = frozenset[int]() if form is None else form.visible
        sequences = [
            Sequence(
                next(_sequence_ids),
                ids,
                params,
                Detokenizer(self._token_bytes, continues_text, visible),
                _choice_seed(seed, index),
                constraint=None if form is None else self._grammars.constraint(form.grammar),
                priority=priority,
            )
            for ids in prompts
            for index in range(n)
        ]
        return GenerationRequest(
            sequences=sequences,
            n=n,
            prompt_tokens=sum(map(len, prompts)),
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            logprobs=params.logprobs is not None,
            echo=echo,
            form=form,
        )

    def probe(self, tokens: list[int], keys: KeyChain, probes: Literal["fresh", "shared"]) -> Sequence:
        """A sequence that wants the logits after these tokens, when nobody else has anything to compute."""
        params, priority = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), _PRIORITY_RANGE
        detokenizer = Detokenizer(self._token_bytes)
        return Sequence(
            next(_sequence_ids), tokens, params, detokenizer, 0, keys=keys, priority=priority, probes=probes
        )

    def pooled(self, prompts: list[list[int]], priority: int | None) -> list[Sequence]:
        """A sequence for each prompt that generates nothing and whose hidden states are wanted.

        Raises:
            InvalidRequest: names ``priority``.
        """
        params = SamplingParams(max_tokens=0)
        rank = self._priority(priority)
        return [
            Sequence(next(_sequence_ids), ids, params, Detokenizer(self._token_bytes), 0, priority=rank, pooled=True)
            for ids in prompts
        ]

    def _priority(self, value: int | None) -> int:
        if value and not self._takes_priority:
            raise InvalidRequest("priority: not offered here, where who came first goes first; expected 0", "priority")
        if value is not None and not -_PRIORITY_RANGE <= value < _PRIORITY_RANGE:
            raise InvalidRequest("priority: expected an integer of 32 bits; smaller ones go first", "priority")
        return value or 0


def _refuse_common_fields(request: CommonFields) -> None:
    if request.store:
        raise InvalidRequest("store: nothing is stored here, expected false", "store")
    if request.service_tier not in (None, "auto", "default"):
        raise InvalidRequest("service_tier: expected 'auto' or 'default'", "service_tier")
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options: only with stream true", "stream_options")
    if options is not None and options.include_obfuscation:
        raise InvalidRequest("stream_options.include_obfuscation: not offered", "stream_options.include_obfuscation")


def _choice_seed(seed: int, index: int) -> int:
    """The answers to one request draw differently, each of them reproducibly."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{index}".encode())
