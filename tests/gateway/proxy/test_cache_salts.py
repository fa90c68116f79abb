"""The salts of KV blocks in vLLM: tenants share none of them."""

from typing import Any

import msgspec
import pytest

from gateway.settings.upstreams import UpstreamSettings
from tests.gateway.api.prefix_upstream import PrefixUpstream
from tests.gateway.client import chat
from tests.gateway.conftest import Stage


def salts_of(upstream: PrefixUpstream) -> list[str | None]:
    """Of each request for an answer."""
    return [msgspec.json.decode(received.body).get("cache_salt") for received in upstream.asked]


async def vllm(stage: Stage) -> PrefixUpstream:
    upstream = await stage.prefix()
    upstream.owned_by = "vllm"
    return upstream


async def test_each_tenant_has_a_salt_of_its_own(stage: Stage) -> None:
    """vLLM is known by its list of models. Who has no credential shares blocks, as its answers are shared."""
    upstream = await vllm(stage)
    client = await stage.gateway(upstream)
    await client.gateway.router.refresh()
    for tenant in (client.tenant("sk-ours"), client.tenant("sk-theirs"), client):
        for question in ("one", "two"):
            assert (await tenant.post(chat(question))).status == 200
    ours, ours_again, theirs, theirs_again, *public = salts_of(upstream)

    assert ours == ours_again != theirs == theirs_again
    assert None not in (ours, theirs)
    assert public == [None, None]


async def test_a_salt_that_a_client_sends_is_never_anothers(stage: Stage) -> None:
    """It parts blocks within its tenant, and does not reach those of another, whose salt it may know."""
    upstream = await vllm(stage)
    client = await stage.gateway(upstream)
    await client.gateway.router.refresh()
    ours, theirs = client.tenant("sk-ours"), client.tenant("sk-theirs")
    await ours.post(chat("one"))
    (known,) = salts_of(upstream)
    for tenant, salt in ((theirs, known), (client, known), (ours, "mine"), (ours, "other"), (theirs, "mine")):
        assert (await tenant.post({**chat("two"), "cache_salt": salt})).status == 200
    salts = salts_of(upstream)

    assert len(set(salts)) == len(salts)
    assert None not in salts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one"}),
        ("/v1/embeddings", {"input": "one"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "one"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "one"}),
        ("/v1/score", {"text_1": "one", "text_2": "two"}),
    ],
)
async def test_every_endpoint_has_it(stage: Stage, path: str, body: dict[str, Any]) -> None:
    """Whatever has a prompt, and however it is relayed."""
    upstream = await vllm(stage)
    client = await stage.gateway(upstream)
    await client.gateway.router.refresh()
    await client.tenant("sk-ours").send("POST", path, {"model": "mock", **body})
    sent = [received for received in upstream.received if received.method == "POST"]

    assert sent
    assert all(msgspec.json.decode(received.body)["cache_salt"] for received in sent)


@pytest.mark.parametrize(
    ("owned_by", "setting", "is_sent"),
    [("vllm", None, True), ("vllm", False, False), ("openai", None, False), ("openai", True, True)],
)
async def test_only_vllm_gets_the_field(stage: Stage, owned_by: str, setting: bool | None, is_sent: bool) -> None:
    """Others may refuse fields that OpenAI does not have; the setting decides where there is one."""
    upstream = await stage.prefix()
    upstream.owned_by = owned_by
    client = await stage.gateway(UpstreamSettings(url=upstream.url, cache_salt=setting))
    await client.gateway.router.refresh()
    assert (await client.tenant("sk-ours").post(chat())).status == 200
    (salt,) = salts_of(upstream)

    assert (salt is not None) == is_sent


async def test_a_salt_outlives_the_gateway(stage: Stage) -> None:
    """Another one finds the blocks again."""
    upstream = await vllm(stage)
    for _ in range(2):
        client = await stage.gateway(UpstreamSettings(url=upstream.url, cache_salt=True))
        await client.tenant("sk-ours").post(chat())

    assert len(set(salts_of(upstream))) == 1
