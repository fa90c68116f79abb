"""A checked request as the engine gets it: a sequence for each answer."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import Literal

import xxhash

from backend.chat.grammar import GrammarCompiler
from backend.chat.output_constraint import OutputConstraint
from backend.chat.reasoning import ReasoningFormat
from backend.engine.sequence import SamplingParams, Sequence
from backend.errors import InvalidRequest
from backend.protocol import CommonFields
from backend.requests.sampling import in_range
from backend.text.detokenizer import Detokenizer, TokenBytes
from prefix_store.identity.keys import KeyChain

_PRIORITY_RANGE = 2**31

_sequence_ids = itertools.count()


@dataclass(frozen=True)
class ChatAnswer:
    """How the answers to a chat are taken apart and shown."""

    calls_functions: bool
    """Whether calls are shown as ``function_call``, which OpenAI has deprecated, and not as ``tool_calls``."""
    reasoning_format: ReasoningFormat | None
    """How thoughts are marked; None: they are not, or none can be."""
    opens_reasoning: bool
    """Whether the answers begin within a thought."""
    shows_reasoning: bool


@dataclass(frozen=True)
class GenerationRequest:
    """A checked chat or completion request.

    ``sequences`` are its choices in order: ``n`` for the first prompt, then ``n`` for the next.
    """

    sequences: list[Sequence]
    n: int
    prompt_tokens: int
    """Tokens of all prompts; a prompt with several answers counts once."""
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool
    output_constraint: OutputConstraint | None = None
    """None: any text."""
    chat: ChatAnswer | None = None
    """None: a completion."""
    prompt_logprobs: bool = False
    cache_salt: str = ""
    ignored: tuple[str, ...] = ()
    """Fields of the request without effect, or only in part."""


class SequenceFactory:
    """Makes sequences for one model.

    Args:
        max_sequences: limit of prompts times ``n`` of one request.
        accepts_priority: whether requests may set ``priority``.
    """

    def __init__(
        self, token_bytes: TokenBytes, grammars: GrammarCompiler, max_sequences: int, accepts_priority: bool
    ) -> None:
        self.max_sequences = max_sequences
        self._accepts_priority = accepts_priority
        self._token_bytes = token_bytes
        self._grammars = grammars

    def choices_per_prompt(self, request: CommonFields) -> int:
        """The value of ``n``.

        Raises:
            InvalidRequest: names ``n``.
        """
        return int(in_range("n", request.n, 1, 1, self.max_sequences))

    def generation_request(
        self,
        request: CommonFields,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        continues_text: bool,
        echo: bool = False,
        output_constraint: OutputConstraint | None = None,
        chat: ChatAnswer | None = None,
        ignored: tuple[str, ...] = (),
        prediction: list[int] | None = None,
    ) -> GenerationRequest:
        """Checks the fields that chats and completions share, and makes ``n`` sequences for each prompt.

        Args:
            prompts: token ids of each prompt.
            continues_text: whether an answer continues the prompt's text, so that its leading space is kept.
            prediction: tokens that the answers are expected to be; None: nothing is known.

        Raises:
            InvalidRequest: names the field.
        """
        _check_streaming(request)
        n = self.choices_per_prompt(request)
        priority = self._priority(request.priority)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        visible = frozenset[int]() if output_constraint is None else output_constraint.visible_tokens
        if chat is not None and chat.reasoning_format is not None:
            markers = (chat.reasoning_format.begin, chat.reasoning_format.end)
            specials = self._token_bytes.special_ids
            visible |= {specials[text] for text in markers if text in specials}
        sequences = [
            Sequence(
                next(_sequence_ids),
                ids,
                params,
                Detokenizer(self._token_bytes, continues_text, visible),
                _choice_seed(seed, index),
                constraint=None if output_constraint is None else self._grammars.constraint(output_constraint.grammar),
                priority=priority,
                prediction=prediction or (),
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
            output_constraint=output_constraint,
            chat=chat,
            prompt_logprobs=request.prompt_logprobs is not None,
            cache_salt=request.cache_salt or "",
            ignored=ignored,
        )

    def probe(self, tokens: list[int], keys: KeyChain, probes: Literal["fresh", "shared"]) -> Sequence:
        """A sequence that computes the logits after these tokens, at the lowest priority."""
        params, priority = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), _PRIORITY_RANGE
        detokenizer = Detokenizer(self._token_bytes)
        return Sequence(
            next(_sequence_ids), tokens, params, detokenizer, 0, keys=keys, priority=priority, probes=probes
        )

    def pooling(self, prompts: list[list[int]], priority: int | None) -> list[Sequence]:
        """A sequence for each prompt that generates nothing and returns its mean hidden state.

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
        if value and not self._accepts_priority:
            raise InvalidRequest("priority: this server schedules first come, first served; expected 0", "priority")
        if value is not None and not -_PRIORITY_RANGE <= value < _PRIORITY_RANGE:
            raise InvalidRequest("priority: expected a 32-bit integer; a smaller one is scheduled earlier", "priority")
        return value or 0


def _check_streaming(request: CommonFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options: only with stream true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: not with stream true", "prompt_logprobs")


def _choice_seed(seed: int, index: int) -> int:
    """A seed for each choice, so that the choices differ and each is reproducible."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{index}".encode())
