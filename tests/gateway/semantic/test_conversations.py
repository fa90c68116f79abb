"""Responses that answer a similar question: each is continued with the question that its client asked."""

from typing import Any

import openai
import pytest

from gateway.upstreams.mock import MockUpstream
from tests.gateway.semantic.stage import AGAIN, ANSWER, ASKED, SemanticStage, until_known
from tests.gateway.surfaces.dialects import openai_client


@pytest.mark.parametrize("asked_first", [1, 2, 3])
async def test_a_similar_question_is_continued_as_it_was_asked(
    semantic: SemanticStage, mock: MockUpstream, asked_first: int
) -> None:
    """Its response has an id of its own, and the id of the first question stays that question's."""
    client = await semantic.gateway(mock)

    async def ask(library: openai.AsyncOpenAI, text: str, **fields: Any) -> Any:
        return await library.responses.create(model="mock", input=text, **fields)

    async with openai_client(client) as library:
        first = [await ask(library, ASKED) for _ in range(asked_first)]
        await until_known(client, 1)
        similar = await ask(library, AGAIN)
        again = await ask(library, ASKED)
        asked = len(mock.received)
        for previous in (first[0].id, similar.id):
            await ask(library, "And then?", previous_response_id=previous)
    continued = [request.fields["messages"][0]["content"] for request in mock.received[asked:]]

    assert asked == 1
    assert similar.output_text == ANSWER
    assert {response.id for response in (*first, again)} == {first[0].id}
    assert similar.id != first[0].id
    assert continued == [ASKED, AGAIN]
