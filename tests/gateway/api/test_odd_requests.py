"""Requests that are right, and that few clients send."""

import gzip

import msgspec
import pytest

from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import json_reply, saying


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
async def test_a_model_is_loaded_by_its_older_field(stage: Stage, path: str) -> None:
    """A request of Ollama's form that only loads may say `name` for `model`, and is answered as with `model`."""
    client = await stage.gateway(await stage.mock())

    older, newer = await client.post({"name": "mock"}, path), await client.post({"model": "mock"}, path)

    assert (older.status, newer.status) == (200, 200)
    varying = {"created_at": None}
    assert older.json | varying == newer.json | varying


async def test_the_items_of_a_compressed_batch_are_not_compressed(stage: Stage) -> None:
    """The content encoding of POST /v1/generate/batch does not reach its items."""
    client = await stage.gateway(await stage.mock())
    body = gzip.compress(msgspec.json.encode({"model": "mock", "prompts": ["a", "b"]}))

    answer = await client.post(body, "/v1/generate/batch", content_encoding="gzip")

    assert [result["status"] for result in answer.json["results"]] == [200, 200]


async def test_an_upstream_that_describes_a_model_with_no_object_is_to_blame(stage: Stage) -> None:
    """An upstream whose POST /api/show answers with something else than an object is an error of status 502."""
    client = await stage.gateway(await stage.raw(saying(json_reply(b"[]"))))

    answer = await client.post({"model": "mock"}, "/api/show")

    assert answer.status == 502
