"""Puts a prediction into the requests for upstreams."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from gateway.proxy.inference_request import with_field
from gateway.surfaces.openai import CHAT
from gateway.upstreams.upstream import PREDICTION, Attempt

_encode = msgspec.json.Encoder().encode


def with_prediction(attempts: Sequence[Attempt], text: str) -> list[Attempt]:
    """The attempts, before each for chat completions the same with a prediction. All bytes of its body stay."""
    field = b'"%s":%s' % (PREDICTION.encode(), _encode({"type": "content", "content": text}))
    made: list[Attempt] = []
    for attempt in attempts:
        if attempt.family == CHAT.family and attempt.body is not None:
            body = with_field(attempt.body, field)
            made.append(replace(attempt, body=body, marks=(*attempt.marks, PREDICTION)))
        made.append(attempt)
    return made
