"""What a request says of its prefix, in each form that it may have, when its blocks come from the disk."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import PREFIX_TOKENS, EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import frames, writing
from tests.backend.prefixes.models import BLOCK
from tests.cache.entries.entry_examples import until

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
    """What the header of a streamed answer says, and its chunks."""
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
    """Of one token nothing can be restored; of whole blocks all but the last one; with a token more all of them."""
    prompt = await kept(writer, disk, tokens)
    expected = await plain.ask(prompt)
    for _ in range(2):  # from the folder, then from the engine's own pool
        answer = await reader.ask(prompt)
        assert answer.restored == restored
        assert answer.choices == expected.choices


async def test_a_streamed_answer_says_it_too(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path
) -> None:
    """The header, which comes before the first token, and usage, in the last chunk."""
    prompt = await kept(writer, disk, TOKENS)
    header, chunks = await events(reader, prompt)
    assert header == WHOLE
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE
    expected = await plain.ask(prompt)
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == expected.choices[0]["text"]


async def test_chats(writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path) -> None:
    """They are conversations without being told so; whole and streamed answers say the same, and are right."""
    question = "What is kept of this question, " + "and of this part of it, " * 10
    async with writing(disk, 200 // BLOCK):
        computed = await writer.ask(question, path=CHAT, reuse=None)
    header, chunks = await events(reader, question, path=CHAT, reuse=None)
    again = await reader.ask(question, path=CHAT, reuse=None)
    assert computed.restored == 0
    assert header == again.restored >= 200 // BLOCK * BLOCK
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == header
    expected = await plain.ask(question, path=CHAT)
    assert computed.choices == again.choices == expected.choices


async def test_one_shots_are_kept_when_they_come_again(writer: EngineProcess, disk: Path) -> None:
    """A completion that nobody calls a conversation is written at its second use and not before."""
    prompt = fresh(TOKENS)
    before = set(frames(disk))
    assert (await writer.ask(prompt, reuse=None)).restored == 0
    await kept(writer, disk, TOKENS)  # what comes later is there, so the other had its time
    assert len(set(frames(disk)) - before) == TOKENS // BLOCK
    async with writing(disk, TOKENS // BLOCK):
        await writer.ask(prompt, reuse="one-shot")


@pytest.mark.parametrize("reuse", ["always", "", "conversation, one-shot"])
async def test_a_reuse_that_is_none(reader: EngineProcess, reuse: str) -> None:
    """400, and the message names the header and what would be right."""
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
    """With n = 2 both go on from the restored prefix, and are what they are without one."""
    prompt = await kept(writer, disk, TOKENS)
    sampled: dict[str, Any] = {"n": 2, "temperature": 0.8, "seed": 5, "max_tokens": 12}
    answer, expected = await reader.ask(prompt, **sampled), await plain.ask(prompt, **sampled)
    assert answer.restored == WHOLE
    assert answer.choices == expected.choices
    assert len(answer.choices) == 2


@pytest.mark.parametrize("prompts", [1, 8])
async def test_many_at_once(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path, prompts: int
) -> None:
    """Eight clients with one prompt, and with eight: nobody gets what is another's, and those that were read say so."""
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
    """Some milliseconds after they asked, while blocks are read or the answer is made: nothing of theirs stays in the
    pool's books, and who asks the same afterwards gets what is right.
    """
    prompt = await kept(writer, disk, 600)
    for cut in range(0, 600, 100):
        leaving = asyncio.create_task(reader.ask(prompt[: cut + 100] + fresh(3), max_tokens=50))
        await asyncio.wait([leaving], timeout=cut / 20_000)
        leaving.cancel()
        await asyncio.wait([leaving])

    async def is_idle() -> bool:
        held = [await reader.counted(name) for name in ("running_sequences", "waiting_sequences", "kv_blocks_held")]
        return not any(held)

    await until(is_idle, 20.0, 0.02)
    assert (await reader.ask(prompt)).choices == (await plain.ask(prompt)).choices
    assert await reader.counted("integrity_problems_total") == 0


async def test_more_than_the_pool_holds(
    writer: EngineProcess, reader: EngineProcess, plain: EngineProcess, disk: Path
) -> None:
    """Four prompts of 37 blocks at once for a pool of 64: they wait for each other, and all are right."""
    prompts = [await kept(writer, disk, 600) for _ in range(4)]
    expected = [await plain.ask(prompt, max_tokens=20) for prompt in prompts]
    answers = await asyncio.gather(*(reader.ask(prompt, max_tokens=20) for prompt in prompts))
    for answer, right in zip(answers, expected, strict=True):
        assert answer.choices == right.choices
    assert max(answer.restored for answer in answers) == 600 // BLOCK * BLOCK
