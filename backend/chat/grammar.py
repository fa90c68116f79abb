"""Compiles grammars and masks the tokens that an answer may not continue with.

The grammar engine is llguidance: an Earley parser over a derivative-based lexer, walked along a trie of the
vocabulary. As soon as a token is sampled, a thread computes the next mask while the model computes the next logits.
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

_MAX_CACHED = 64
# Of grammar text; a compiled grammar is some twenty times as large.
_MAX_CACHED_BYTES = 16 * 2**20
_MAX_SCHEMA_BYTES = 256 * 2**10
# White space between the parts of a value: enough for a line break and an indent. Without a limit a small model may
# never write anything else.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,20}"}

# Parts of llguidance's messages that refer to our grammar, which the caller does not see.
_POSITION = re.compile(r'^(at )?(\d+\(\d+\): )?(failed to compile JSON schema: |failed to parse "%json": )?')
_QUOTED_LINE = re.compile(r"\n +\d+ \| [^\n]*\n[ ^]*\n?\Z|\s*<non-verbose/>")
# The quoted pattern in a message, which may be very long.
_PATTERN = re.compile(r"regex parse error:\n.*\nerror: ", re.DOTALL)


def to_lark(grammar: str) -> str:
    """A grammar in Lark's or in GBNF's notation, in Lark's. Raises GrammarError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(grammar)
    except RecursionError as error:
        raise GrammarError("nested too deeply") from error
    except Exception as error:  # of a rule that is missing it raises a bare Exception
        raise GrammarError(f"neither Lark nor GBNF: {error}") from error
    return lark


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, with an LRU cache. Thread-safe.

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
        """A constraint for one answer, at its start. A new grammar takes milliseconds, the very first one a second.

        Args:
            grammar: in llguidance's dialect of Lark.

        Raises:
            GrammarError: it does not compile; the message is llguidance's.
        """
        with self._lock:
            known = self._compiled.get(grammar)
        if known is None:
            # Without the lock, so that requests do not wait for each other. Compiling one twice does no harm.
            known = self._compile(grammar)
        with self._lock:
            if self._compiled.pop(grammar, None) is None:
                self._compiled_text += len(grammar)
            self._compiled[grammar] = known
            while len(self._compiled) > _MAX_CACHED or self._compiled_text > _MAX_CACHED_BYTES:
                oldest, _ = self._compiled.popitem(last=False)
                self._compiled_text -= len(oldest)
        matcher, first = known
        return GrammarConstraint(matcher.deep_copy(), first, frozenset(self._eos), self._worker)

    def close(self) -> None:
        """Stops the thread; call it after the engine has stopped."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _num_tokens(self) -> int:
        """The larger of the model's and the tokenizer's vocabulary; masks have the model's length."""
        return max(self._vocab_size, 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values()))

    def _compile(self, grammar: str) -> tuple[LLMatcher, torch.Tensor]:
        from llguidance import LLMatcher, LLParserLimits

        # Verbose errors would quote the answer.
        limits = LLParserLimits(verbose_errors=False)
        with self._vocabulary_lock:
            if self._known_vocabulary is None:
                self._known_vocabulary = _vocabulary(self._tokenizer.to_str(), self._num_tokens(), self._eos)
        matcher = LLMatcher(self._known_vocabulary, grammar, log_level=0, limits=limits)
        # The first mask of a grammar builds tables that all copies of the matcher share.
        first = None if matcher.is_error() else _mask(matcher, self._vocab_size)
        if first is None or matcher.is_error():
            raise GrammarError(_reason(matcher))
        return matcher, first


class GrammarConstraint:
    """Masks the tokens of one answer by a grammar; see ``backend.engine.sequence.Constraint``.

    If the matcher fails (by its own limits), only the end of the answer is allowed and ``error`` says why.
    """

    def __init__(
        self, matcher: LLMatcher, first: torch.Tensor, eos_token_ids: frozenset[int], worker: ThreadPoolExecutor
    ) -> None:
        self.error: str | None = None
        self.complete = False
        """Whether only the end of the answer can follow."""
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
        """Advances by the sampled token and starts to compute the next mask in the worker thread."""
        self.allowed()  # waits for the worker, which uses the matcher
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
    """The body of a grammar rule for a JSON value.

    Each schema is a document of its own: references resolve within it.

    Raises:
        GrammarError: the schema is nested too deeply, or would take more time or memory than a request may have.
    """
    try:
        text = json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
        if len(text) > _MAX_SCHEMA_BYTES:
            raise GrammarError(f"{len(text)} bytes of schema, expected at most {_MAX_SCHEMA_BYTES}")
        check_schema(schema)
    except RecursionError as error:
        raise GrammarError("nested too deeply") from error
    return f"%json {text}"


@lru_cache(maxsize=1)
def _vocabulary(tokenizer: str, tokens: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The trie of a vocabulary, which takes a second to build; cached for servers of the same model in this process."""
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
