"""Answers of a given form: grammars, compiled once, and the tokens that each of them allows next.

The grammar engine is llguidance: an Earley parser over a derivative-based lexer, walked along a trie of the
vocabulary. It works beside the model: as soon as a token is chosen, a thread computes which ones may follow, and the
sampler finds the mask ready when the model's next logits are.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backend.chat.schema_limits import GrammarError as GrammarError
from backend.chat.schema_limits import check_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_MOST_COMPILED = 64
# What is compiled of a large grammar is some twenty times its text.
_MOST_COMPILED_TEXT = 16 * 2**20
_LONGEST_SCHEMA = 256 * 2**10
# Between the parts of a value models write a space, or a line break and an indent. Without a limit, a small model may
# write white space for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,20}"}

# Where in our grammar a schema stood, and how it reads there, tells the caller nothing.
_POSITION = re.compile(r'^(at )?(\d+\(\d+\): )?(failed to compile JSON schema: |failed to parse "%json": )?')
_QUOTED_LINE = re.compile(r"\n +\d+ \| [^\n]*\n[ ^]*\n?\Z|\s*<non-verbose/>")
# Of a pattern that cannot be read, why: the pattern itself may be very long.
_PATTERN = re.compile(r"regex parse error:\n.*\nerror: ", re.DOTALL)


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary and keeps the latest ones. Safe to use from several threads.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: length of a row of logits.
        eos_token_ids: tokens that end an answer; at least one.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._known_vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._compiled: OrderedDict[str, tuple[LLMatcher, torch.Tensor]] = OrderedDict()
        self._compiled_text = 0
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A follower of one answer, at its start. A new grammar takes milliseconds, the very first one a second.

        Args:
            grammar: in llguidance's dialect of Lark.

        Raises:
            GrammarError: it does not compile; the message is llguidance's.
        """
        with self._lock:
            known = self._compiled.get(grammar)
        if known is None:
            # Without the lock, so that nobody waits for a stranger's grammar; compiled twice, it is the same.
            known = self._compile(grammar)
        with self._lock:
            if self._compiled.pop(grammar, None) is None:
                self._compiled_text += len(grammar)
            self._compiled[grammar] = known
            while len(self._compiled) > _MOST_COMPILED or self._compiled_text > _MOST_COMPILED_TEXT:
                oldest, _ = self._compiled.popitem(last=False)
                self._compiled_text -= len(oldest)
        matcher, first = known
        return GrammarConstraint(matcher.deep_copy(), first, frozenset(self._eos), self._worker)

    def close(self) -> None:
        """Ends the thread; only after the engine, whose answers it follows, has ended."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _tokens(self) -> int:
        """Of model and tokenizer: either may have some that the other does not; masks end with the model's."""
        return max(self._vocab_size, 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values()))

    def _compile(self, grammar: str) -> tuple[LLMatcher, torch.Tensor]:
        from llguidance import LLMatcher, LLParserLimits

        # Verbose errors would quote the answer.
        limits = LLParserLimits(verbose_errors=False)
        with self._vocabulary_lock:
            if self._known_vocabulary is None:
                self._known_vocabulary = _vocabulary(self._tokenizer.to_str(), self._tokens(), self._eos)
        matcher = LLMatcher(self._known_vocabulary, grammar, log_level=0, limits=limits)
        # Computed here, for the first mask of a grammar builds tables that all of its copies share.
        first = None if matcher.is_error() else _mask(matcher, self._vocab_size)
        if first is None or matcher.is_error():
            raise GrammarError(_reason(matcher))
        return matcher, first


class GrammarConstraint:
    """Follows one answer along a grammar; see ``backend.engine.sequence.Constraint``.

    When the grammar can no longer go on (by its own limits), only the end is allowed and ``error`` says why.
    """

    def __init__(
        self, matcher: LLMatcher, first: torch.Tensor, eos_token_ids: frozenset[int], worker: ThreadPoolExecutor
    ) -> None:
        self.error: str | None = None
        self.complete = False
        """Whether the answer is whole, so that nothing but its end can follow."""
        self._matcher = matcher
        self._eos = eos_token_ids
        self._worker = worker
        self._vocab_size = first.shape[0]
        self._next: Future[torch.Tensor] | torch.Tensor = first

    def allowed(self) -> torch.Tensor:
        """bool [vocab_size]: the tokens that may come next."""
        if isinstance(self._next, Future):
            self._next = self._next.result()
            if self._matcher.is_error():
                self._fail()
        return self._next

    def accept(self, token_id: int) -> None:
        """Takes over the chosen token, and lets the next mask be computed while the model computes its step."""
        self.allowed()  # one at a time uses the matcher
        if token_id in self._eos or self.error is not None:
            return
        if not self._matcher.consume_token(token_id):
            self._fail()
        elif self._matcher.is_stopped():
            self.complete = True
            self._next = self._end_only()
        else:
            self._next = self._worker.submit(_mask, self._matcher, self._vocab_size)

    def _fail(self) -> None:
        self.error = _reason(self._matcher)
        self._next = self._end_only()

    def _end_only(self) -> torch.Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[list(self._eos)] = True
        return mask


def json_schema(schema: dict[str, Any]) -> str:
    """A JSON value in a grammar: what follows a rule's name and colon.

    References are looked up in the schema itself, so every schema stays a document of its own.

    Raises:
        GrammarError: the schema is nested too deeply, or would take more time or memory than a request may have.
    """
    try:
        text = json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
        if len(text) > _LONGEST_SCHEMA:
            raise GrammarError(f"{len(text)} bytes of schema, expected at most {_LONGEST_SCHEMA}")
        check_schema(schema)
    except RecursionError as error:
        raise GrammarError("nested too deeply") from error
    return f"%json {text}"


@lru_cache(maxsize=1)
def _vocabulary(tokenizer: str, tokens: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The trie of a vocabulary: a second's work, which all that serve the same model in this process share."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=tokens, eos_token=list(eos_token_ids))


def _reason(matcher: LLMatcher) -> str:
    error: str = matcher.get_error()
    if error.startswith("NoExtension"):
        return "nothing can be an answer, or go on from here; a $ref that only leads back to itself is one cause"
    return " ".join(_PATTERN.sub("a pattern cannot be read: ", _QUOTED_LINE.sub("", _POSITION.sub("", error))).split())


def _mask(matcher: LLMatcher, vocab_size: int) -> torch.Tensor:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.unpackbits(bits, bitorder="little", count=vocab_size)
    return torch.from_numpy(allowed.view(np.bool_))
