"""Takes the tokens of the gateway's own predictions out of the usage that clients see.

To a client that sent no prediction, the usage says 0 accepted and 0 rejected tokens, as where there was none. OpenAI's
fields are `completion_tokens_details.accepted_prediction_tokens` and `.rejected_prediction_tokens`.
"""

import re
from typing import NamedTuple

_NAME = b"_prediction_tokens"
# Quotes within a string are escaped: what ends with a plain one and a colon is the name of a field.
_COUNT = re.compile(rb'("(accepted|rejected)_prediction_tokens"\s*:\s*)(\d{1,15})(?!\d)')


class PredictionTokens(NamedTuple):
    """Tokens of a prediction that were in the answer, and that were computed in vain."""

    accepted: int = 0
    rejected: int = 0


def without_prediction_tokens(text: bytes) -> tuple[bytes, PredictionTokens | None]:
    """An answer or an event of a stream with 0 in place of both counts, and the counts; None if it has none.

    All other bytes stay.
    """
    if _NAME not in text:
        return text, None
    counts = {found[2]: int(found[3]) for found in _COUNT.finditer(text)}
    if not counts:
        return text, None
    tokens = PredictionTokens(counts.get(b"accepted", 0), counts.get(b"rejected", 0))
    return _COUNT.sub(rb"\g<1>0", text), tokens
