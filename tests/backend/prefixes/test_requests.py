"""Each form of request is answered right and reports its restored prefix when its blocks come from the disk."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import PREFIX_TOKENS, EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import frames, until_idle, writing
from tests.backend.prefixes.models import BLOCK

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
TOKENS = 300
WHOLE = TOKENS // BLOCK * BLOCK


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest.fixture(scope="module")
def pair(launch: Start, secret: Path, disk: Path) -> tuple[EngineProcess, EngineProcess]:
    """One that writes, and one that reads what it has never computed; the reader's pool has room for 64 blocks."""
    options = ("--prefix-disk", str(disk), "--prefix-secret-file", str(secret))
    writer, reader = launch(*options), launch(*options, "--kv-memory", "1MiB")
    start_all([writer, reader])
    return writer, reader


@pytest.fixture
def writer(pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    return pair[0]


@pytest.fixture
def reader(pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    return pair[1]


async def kept(writer: EngineProcess, disk: Path, tokens: int) -> list[int]:
    """A new prompt whose blocks are in the folder."""
    prompt = fresh(tokens)
    async with writing(disk, tokens // BLOCK):
        await writer.ask(prompt)
    return prompt


async def events(engine: EngineProcess, prompt: list[int] | str, **options: Any) -> tuple[int, list[dict[str, Any]]]:
    """The prefix header of a streamed answer, and its chunks."""
    async with engine.post(prompt, stream=True, stream_options={"include_usage": True}, **options) as response:
        lines = [line async for line in response.content]
    said = [line.removeprefix(b"data: ") for line in lines if line.strip()]
    assert said.pop().strip() == b"[DONE]"
    return int(response.headers[PREFIX_TOKENS]), [json.loads(line) for line in said]


@pytest.mark.parametrize(
    ("tokens", "restored"),
    [(1, 0), (BLOCK - 1, 0), (BLOCK, 0), (BLOCK + 1, BLOCK), (10 * BLOCK, 9 * BLOCK), (10 * BLOCK + 1, 10 * BLOCK)],
)
async def test_the_last_token_is_computed(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path, tokens: int, restored: int
) -> None:
    """The last token of a prompt is always computed: whole blocks are restored up to the one that has it."""
    prompt = await kept(writer, disk, tokens)
    expected = await plain.ask(prompt)
    for _ in range(2):  # from the folder, then from the engine's own pool
        answer = await reader.ask(prompt)
        assert answer.restored == restored
        assert answer.choices == expected.choices


async def test_a_streamed_answer_reports_its_restored_tokens(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path
) -> None:
    """A streamed answer reports its restored tokens in the header and in the usage of its last chunk."""
    prompt = await kept(writer, disk, TOKENS)
    header, chunks = await events(reader, prompt)
    assert header == WHOLE
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE
    expected = await plain.ask(prompt)
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == expected.choices[0]["text"]


async def test_chats_are_kept_without_a_reuse_header(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path
) -> None:
    """Chats are kept as conversations without a header; whole and streamed answers report the same restored tokens."""
    question = "What is kept of this question, " + "and of this part of it, " * 10
    async with writing(disk, 288 // BLOCK):
        computed = await writer.ask(question, path=CHAT, reuse=None)
    header, chunks = await events(reader, question, path=CHAT, reuse=None)
    again = await reader.ask(question, path=CHAT, reuse=None)
    assert computed.restored == 0
    assert header == again.restored == 288 // BLOCK * BLOCK
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == header
    expected = await plain.ask(question, path=CHAT)
    assert computed.choices == again.choices == expected.choices


async def test_one_shots_are_written_at_their_second_use(writer: EngineProcess, disk: Path) -> None:
    """A completion that is not called a conversation is written at its second use and not before."""
    prompt = fresh(TOKENS)
    before = set(frames(disk))
    assert (await writer.ask(prompt, reuse=None)).restored == 0
    await kept(writer, disk, TOKENS)  # what comes later is there, so the other had its time
    assert len(set(frames(disk)) - before) == TOKENS // BLOCK
    async with writing(disk, TOKENS // BLOCK):
        await writer.ask(prompt, reuse="one-shot")


@pytest.mark.parametrize("reuse", ["always", "", "conversation, one-shot"])
async def test_a_wrong_reuse_header_is_a_400(reader: EngineProcess, reuse: str) -> None:
    """A wrong reuse header is a 400 whose message names the header and its values."""
    with pytest.raises(AssertionError) as refusal:
        await reader.ask(fresh(20), reuse=reuse)
    said = str(refusal.value)
    assert "x-keepgate-reuse" in said
    assert "conversation" in said
    assert "one-shot" in said
    assert "invalid_request_error" in said


async def test_several_answers_to_one_prompt(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path
) -> None:
    """With `n=2` both answers continue the restored prefix and are what they are without one."""
    prompt = await kept(writer, disk, TOKENS)
    sampled: dict[str, Any] = {"n": 2, "temperature": 0.8, "seed": 5, "max_tokens": 12}
    answer, expected = await reader.ask(prompt, **sampled), await plain.ask(prompt, **sampled)
    assert answer.restored == WHOLE
    assert answer.choices == expected.choices
    assert len(answer.choices) == 2


@pytest.mark.parametrize("prompts", [1, 8])
async def test_concurrent_clients_get_their_own_prefixes(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path, prompts: int
) -> None:
    """Eight concurrent clients with one prompt, or with eight, each get the answer to their own prompt."""
    asked = [await kept(writer, disk, 100) for _ in range(prompts)] * (8 // prompts)
    endings = [fresh(5) for _ in asked]
    answers = await asyncio.gather(
        *(reader.ask(prompt + ending) for prompt, ending in zip(asked, endings, strict=True))
    )
    for prompt, ending, answer in zip(asked, endings, answers, strict=True):
        assert answer.choices == (await plain.ask(prompt + ending)).choices
        assert answer.restored in (0, 100 // BLOCK * BLOCK)
    # Of short prompts at a busy moment some may be computed sooner than they are read.
    assert any(answer.restored for answer in answers)


async def test_clients_that_leave_at_any_time(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path
) -> None:
    """Clients that disconnect during a fetch or an answer leave no sequence and no held block behind."""
    prompt = await kept(writer, disk, 600)
    for cut in range(0, 600, 100):
        leaving = asyncio.create_task(reader.ask(prompt[: cut + 100] + fresh(3), max_tokens=50))
        await asyncio.wait([leaving], timeout=cut / 20_000)
        leaving.cancel()
        await asyncio.wait([leaving])
    await until_idle(reader)
    assert (await reader.ask(prompt)).choices == (await plain.ask(prompt)).choices
    assert await reader.counted("integrity_problems_total") == 0


async def test_prompts_that_exceed_the_pool_wait_for_each_other(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path
) -> None:
    """Four concurrent prompts of 37 blocks for a pool of 64 wait for each other, and all answers are right."""
    prompts = [await kept(writer, disk, 600) for _ in range(4)]
    expected = [await plain.ask(prompt, max_tokens=20) for prompt in prompts]
    answers = await asyncio.gather(*(reader.ask(prompt, max_tokens=20) for prompt in prompts))
    for answer, right in zip(answers, expected, strict=True):
        assert answer.choices == right.choices
    assert max(answer.restored for answer in answers) == 600 // BLOCK * BLOCK
