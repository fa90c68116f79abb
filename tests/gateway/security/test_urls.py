"""URLs that an upstream would fetch from within the operator's network are refused by every endpoint that has them."""

import pytest

from tests.gateway.conftest import Stage

URL = b"http://169.254.169.254/latest/meta-data"
IMAGE = b'{"type":"image_url","image_url":{"url":"%s"}}' % URL


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"model":"mock","messages":[{"role":"user","content":[%s]}]}' % IMAGE),
        ("/v1/messages/count_tokens", b'{"model":"mock","messages":[{"role":"user","content":[%s]}]}' % IMAGE),
        ("/v1/embeddings", b'{"model":"mock","input":"a","messages":[{"role":"user","content":[%s]}]}' % IMAGE),
        ("/v1/embeddings", b'{"model":"mock","messages":[{"role":"user","content":[%s]}]}' % IMAGE),
        ("/v1/pooling", b'{"model":"mock","x":NaN,"messages":[{"role":"user","content":[%s]}]}' % IMAGE),
        ("/v1/images/edits", b'{"model":"mock","images":[{"image_url":"%s"}]}' % URL),
    ],
)
async def test_a_private_url_reaches_no_upstream(stage: Stage, path: str, body: bytes) -> None:
    """The error names the field."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    answer = await client.post(body, path)
    assert answer.status == 400
    assert b"must not be a URL of this machine or of a private network" in answer.body
    assert mock.received == []
