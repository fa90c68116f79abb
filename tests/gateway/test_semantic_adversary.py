"""What somebody may try on the semantic cache who means no good, or whose texts, timing and network are odd."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cache.key import namespace_for
from cache.semantic.embedding.encoder import Encoder
from gateway.mock import MockUpstream, Reply
from gateway.settings import Secret
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.semantic_stage import SemanticStage, entries, figure, until_figure, until_known
from tests.gateway.serving import DEADLINE, serving

ASKED = "How do I reset my password?"
AGAIN = "How can I reset my password?"
ANSWER = "Open the settings, choose Security, and click Reset password."
ODD_TEXTS = (
    "\N{THUMBS UP SIGN}",
    "\N{THUMBS DOWN SIGN}",
    "\N{PILE OF POO} \N{PILE OF POO}",
    "\x00",
    "\x01",
    "\u200b",
    "\u202egnp.exe",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u05dc\u05d0",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u6211\u60f3\u53d6\u6d88\u8ba2\u5355",
    "\u6211\u60f3\u521b\u5efa\u8ba2\u5355",
    "+",
    "-",
    "\ufffd",
    "Z\u0335\u0321\u0322" * 300,
    "x" * 4096,
    "y" * 4097,
    "word " * 20_000,
    "\u2028",
    " \n\t ",
)


@pytest.fixture
async def semantic(stage: Stage, minilm: Encoder, folder: Path) -> AsyncIterator[SemanticStage]:
    async with AsyncExitStack() as stack:
        yield SemanticStage(stage, stack, minilm, folder)


@pytest.fixture
async def mock(stage: Stage) -> MockUpstream:
    return await stage.mock(Reply(text=ANSWER))


async def _settled(client: Client) -> None:
    """Whatever has been told before this is learned: notes and questions come in order, and are learned in order."""
    known = await entries(client)
    await client.post(chat("Who painted the ceiling of the Sistine Chapel?", user="settled"))
    await until_known(client, known + 1)


async def test_odd_texts_get_no_answer_but_their_own(semantic: SemanticStage, stage: Stage) -> None:
    """A model that knows none of the signs finds them all the same; they are answered, and never by one another."""
    mock = await stage.mock()  # it answers each with its own text
    client = await semantic.gateway(mock, semantic={"threshold": 0.01})
    for text in ODD_TEXTS:
        first = await client.post(chat(text))
        assert (first.status, first.text, first.cache) == (200, text, "miss"), repr(text[:20])
    for text in ODD_TEXTS:
        again = await client.post(chat(text))
        assert (again.text, again.headers["x-keepgate-layer"]) == (text, "exact"), repr(text[:20])


async def test_many_at_once_are_all_answered_and_the_next_waits_for_none_of_them(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """Too many for their deadline: those go upstream."""
    client = await semantic.gateway(mock, semantic={"deadline": 0.05})
    answers = await asyncio.gather(*(client.post(chat(f"Is seat number {number} free?")) for number in range(300)))
    assert {(answer.status, answer.text) for answer in answers} == {(200, ANSWER)}

    async with asyncio.timeout(2.0):
        assert (await client.post(chat(ASKED))).status == 200


async def test_who_leaves_in_the_middle_teaches_nothing(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Half an answer is none."""
    client = await semantic.gateway(mock)
    mock.hold.clear()
    async with client.stream(chat(ASKED, stream=True)) as stream:
        await stream.event()
    await mock.wait_for_cancelled(1)
    mock.hold.set()
    await _settled(client)

    assert await entries(client) == 1
    assert (await client.post(chat(AGAIN))).cache == "miss"


async def test_what_is_not_to_be_stored_is_neither_asked_for_nor_learned(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """no-store, said by the client or by the upstream."""
    client = await semantic.gateway(mock)
    asked = await figure(client, "asked")
    assert (await client.post(chat(ASKED), Cache_Control="no-store")).cache == "bypass"
    assert await figure(client, "asked") == asked
    mock.replies[:] = [Reply(text=ANSWER, headers={"Cache-Control": "no-store"})]
    assert (await client.post(chat(ASKED))).cache == "miss"
    mock.replies[:] = [Reply(text=ANSWER)]
    await _settled(client)

    assert await entries(client) == 1


async def test_nobody_evicts_what_is_not_his(semantic: SemanticStage, mock: MockUpstream) -> None:
    """Another tenant's entry looks like none; neither it nor what was learned of it changes."""
    client = await semantic.gateway(mock, admin_key=Secret("sk-operator"), host="127.0.0.1")
    ours = client.tenant("sk-ours")
    operator = client.tenant("sk-operator")
    first = await ours.post(chat(ASKED))
    await until_known(operator, 1)
    assert (await ours.post(chat(AGAIN))).entry == first.entry
    namespace, _, digest = first.entry.partition(".")
    for forged in (first.entry, f"{first.entry}.0", f"*.{digest}", f"*{first.entry}", f"{namespace}%2E{digest}"):
        answer = await client.tenant("sk-theirs").send("DELETE", f"/v1/cache/entries/{forged}?reason=wrong")
        assert answer.status in (401, 404), forged

    assert await figure(operator, "labels_from_user") == 0
    assert await entries(operator) == 1


async def test_a_tenant_confirms_once(semantic: SemanticStage, mock: MockUpstream) -> None:
    """However often it asks, and in whatever words; the publisher itself confirms nothing."""
    published = (namespace_for("Bearer sk-docs"),)
    client = await semantic.gateway(mock, semantic={"published": published, "confirmations": 2})
    await client.tenant("sk-docs").post(chat(ASKED))
    await until_known(client, 1)
    known = 1
    for tenant, question in itertools.product(("sk-docs", "sk-a"), (AGAIN, f"Please, {AGAIN}")):
        await client.tenant(tenant).post(chat(question), Cache_Control="no-cache")
        known += 1
        await until_known(client, known)

    assert (await client.tenant("sk-b").post(chat(AGAIN))).cache == "miss"


async def test_an_answer_that_began_before_a_purge_is_not_learned(semantic: SemanticStage, mock: MockUpstream) -> None:
    """It may be what the purge was for."""
    client = await semantic.gateway(mock)
    mock.hold.clear()
    asking = asyncio.create_task(client.post(chat(ASKED)))
    await mock.wait_for(1)
    await client.send("DELETE", "/v1/cache")
    mock.hold.set()
    assert (await asking).status == 200
    await _settled(client)

    assert await entries(client) == 1
    assert (await client.post(chat(AGAIN))).cache == "miss"


async def test_an_entry_that_is_deleted_while_it_is_being_learned_answers_nobody(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """Whichever of the two comes first."""
    client = await semantic.gateway(mock)
    first = await client.post(chat(ASKED))
    await client.send("DELETE", f"/v1/cache/entries/{first.entry}")
    mock.replies[:] = [Reply(text="Ask your administrator.")]

    assert (await client.post(chat(AGAIN))).text == "Ask your administrator."
    assert (await client.post(chat(ASKED.lower()))).text == "Ask your administrator."


async def test_neither_prompts_nor_keys_are_logged(mock: MockUpstream, tmp_path: Path) -> None:
    """Not even at the level debug, neither by the gateway nor by the process of the semantic cache."""
    secret = "Is Xylophonius Quaggmire the one who reset my password?"
    async with serving(
        tmp_path,
        *("--upstream", mock.url),
        KEEPGATE_LOG_LEVEL="debug",
        KEEPGATE_SEMANTIC_MODE="on",
        KEEPGATE_SEMANTIC_POLICY="threshold",
        KEEPGATE_SEMANTIC_THRESHOLD="0.6",
    ) as gateway:
        async with asyncio.timeout(DEADLINE):
            while not (await gateway.stats())["layers"]["semantic"].get("available"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for number in range(3):
            body = chat(f"{secret} {'Please. ' * number}")
            await gateway.send("POST", "/v1/chat/completions", body, Authorization="Bearer sk-hidden")
        async with asyncio.timeout(DEADLINE):
            while not (await gateway.stats())["layers"]["semantic"].get("entries"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await gateway.signal(signal.SIGTERM) == 0
        said = gateway.said.lower()

    for word in ("xylophonius", "quaggmire", "sk-hidden", "click reset password"):
        assert word not in said


async def test_a_wave_of_complaints_takes_out_one_answer_and_no_other(
    semantic: SemanticStage, mock: MockUpstream
) -> None:
    """Who complains of what he was served can complain of nothing else."""
    client = await semantic.gateway(mock)
    other = "What is the capital of Australia?"
    for known, question in enumerate((ASKED, other), start=1):
        await client.post(chat(question))
        await until_known(client, known)
    assert (await client.post(chat(AGAIN))).cache == "hit"
    for _ in range(5):
        await client.post(chat(AGAIN), Cache_Control="no-cache")
    await until_figure(client, "labels_from_user", 1)
    answer = await client.post(chat("Tell me, what is the capital of Australia?"))

    assert (answer.cache, await figure(client, "labels_from_user")) == ("hit", 1)
