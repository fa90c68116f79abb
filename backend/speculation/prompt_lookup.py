"""Drafts from text that is there: the prompt, the answer so far, and a prediction of the answer.

Prompt lookup decoding: what followed the last tokens where they occurred before is likely to follow again, in
summaries, edits and code. A prediction is text that the client, or the gateway, takes for most of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backend.engine.sequence import Sequence

LONGEST_MATCH = 8
"""Longer matches are not told apart."""
_LEAST_MATCH = 2
"""Of prompt and answer; in a prediction, of which most is expected to come, one token will do."""


@dataclass(frozen=True, slots=True)
class Found:
    """What followed an earlier occurrence of a sequence's last tokens."""

    token_ids: npt.NDArray[np.int32]
    match: int
    """How many of the last tokens are alike, 8 at most; 0: the answer begins, and so does the prediction."""
    predicted: bool
    """Whether it is from the prediction."""


class TokenText:
    """The tokens of one sequence, and of its prediction, in one array."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._prediction = len(sequence.prediction)
        # The prediction comes first, so that its places do not change; a token that no model has is between them.
        self._begin = self._prediction + 1 if self._prediction else 0
        room = self._begin + sequence.num_tokens + sequence.params.max_tokens
        self._tokens = np.full(room, -1, dtype=np.int32)
        self._tokens[: self._prediction] = sequence.prediction
        self._count = self._begin
        self._cursor = 0  # in the prediction: after its last token that is known to be part of the answer

    def find(self, most: int) -> Found | None:
        """What may follow, ``most`` tokens at most; None: the last tokens are new."""
        self._catch_up()
        if self._prediction and not self._sequence.num_generated:
            return Found(self._tokens[: min(most, self._prediction)], 0, True)
        found = self._find(0, self._prediction, 1, self._cursor) if self._prediction else None
        if found is not None:
            end, match = found
            self._cursor = end
            return Found(self._tokens[end : min(end + most, self._prediction)], match, True)
        found = self._find(self._begin, self._count - 1, _LEAST_MATCH, self._count)
        if found is None:
            return None
        end, match = found
        return Found(self._tokens[end : min(end + most, self._count)], match, False)

    def _catch_up(self) -> None:
        """Takes over the tokens that were generated since."""
        missing = self._begin + self._sequence.num_tokens - self._count
        if missing:
            self._tokens[self._count : self._count + missing] = self._sequence.tokens[-missing:]
            self._count += missing

    def _find(self, begin: int, end: int, least: int, near: int) -> tuple[int, int] | None:
        """The place after the best occurrence of the last tokens that ends in ``[begin, end)``, and the match's length.

        The longest match is best; of equal ones the first that ends at ``near`` or after it, else the last.
        """
        tokens, last = self._tokens, self._count - 1
        places = np.flatnonzero(tokens[begin:end] == tokens[last]) + begin
        # Something has to follow.
        places = places[places + 1 < (end if end == self._prediction else self._count)]
        match = 0
        while len(places):
            best, match = places, match + 1
            if match == LONGEST_MATCH or last - match < self._begin:
                break
            earlier = places - match
            places = places[(earlier >= begin) & (tokens[np.maximum(earlier, 0)] == tokens[last - match])]
        if match < least:
            return None
        after = best + 1
        later = np.searchsorted(after, near)
        return int(after[later] if later < len(after) else after[-1]), match
