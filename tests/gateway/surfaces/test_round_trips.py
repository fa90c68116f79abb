"""An answer of one form of API, stored, rendered in another, and brought back: nothing is lost on the way.

`ROUND_TRIPS=10000 pytest tests/gateway/surfaces/test_round_trips.py` tries as many for each pair of forms.
"""

import itertools
import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.surfaces.messages.surface import MessagesSurface
from gateway.surfaces.ollama.chat import OllamaChatSurface
from gateway.surfaces.responses.surface import ResponsesSurface
from gateway.surfaces.surface import ChatRequest, Json, Surface
from tests.gateway.surfaces.messages.answer_examples import messages
from tests.gateway.surfaces.ollama.examples import own_answers
from tests.gateway.surfaces.responses.examples import natives

FORMS: tuple[tuple[Surface, st.SearchStrategy[Json], ChatRequest], ...] = (
    (MessagesSurface(), messages, MessagesSurface().chat_request("", {"model": "m", "max_tokens": 1, "messages": []})),
    (ResponsesSurface(), natives(), ResponsesSurface().chat_request("", {"model": "m", "input": "x"})),
    (
        OllamaChatSurface(),
        own_answers(message=True),
        OllamaChatSurface().chat_request("", {"model": "m", "messages": []}),
    ),
)


def text(value: Any) -> str:
    """JSON text, in which 1 and 1.0 differ, and the order of names does not count."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize(("own", "other"), list(itertools.permutations(FORMS, 2)), ids=lambda form: str(form[0].family))
def test_an_answer_comes_back_from_another_form(own: Any, other: Any) -> None:
    """Rendered for a client of the other form, read from there, and rendered in its own form again, it is the same."""
    (surface, answers, request), (another, _, asked) = own, other

    @settings(
        max_examples=int(os.environ.get("ROUND_TRIPS", "40")), deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(answers)
    def check(answer: Json) -> None:
        before = text(answer)
        rendered = another.own_answer(surface.chat_answer(answer), asked, "entry")
        chat = another.chat_answer(json.loads(json.dumps(rendered)))
        assert text(surface.own_answer(chat, request, "entry")) == before

    check()
