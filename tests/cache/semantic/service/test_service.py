"""How the process is put together."""

import asyncio
import threading
import time
from pathlib import Path

import msgspec
import pytest

from cache.errors import StoreUnavailable
from cache.semantic.client import SemanticClient
from cache.semantic.embedding.encoder import Encoder
from cache.semantic.judge import fitted
from cache.semantic.messages import AnswerStored, EntryDeleted, Stats, StatsRequest, line_of
from cache.semantic.service.config import Config
from cache.semantic.service.service import judge_name, open_service
from gateway.settings.cache import SemanticSettings
from tests.waiting import until


def _config(judge: str = "embedding", judge_model: str = "", socket: str = "") -> Config:
    said = msgspec.structs.asdict(SemanticSettings(judge=judge, judge_model=judge_model))
    used = {name: value for name, value in said.items() if name in Config.__struct_fields__}
    return Config(**{**used, "model_key": "", "judge_key": "", "socket": socket, "redis": "", "models": ""})


async def test_what_is_noted_before_the_model_is_loaded_is_learned_later(folder: Path, minilm: Encoder) -> None:
    """So after a restart too: a gateway's next note may be the first message to the new process."""
    loading, goes_on = threading.Event(), threading.Event()

    def load(*_: object) -> Encoder:
        loading.set()
        assert goes_on.wait(60)
        return minilm

    async def serve() -> None:
        async with open_service(_config(socket=str(folder / "s")), load):
            await asyncio.Event().wait()

    async def are_learned() -> bool:
        try:
            return bool((await client.ask(StatsRequest(), Stats)).figures["entries"] == 3)
        except StoreUnavailable:  # it is not ready yet
            return False

    serving = asyncio.create_task(serve())
    client = SemanticClient(folder / "s", 60.0)
    try:
        assert await asyncio.to_thread(loading.wait, 60)
        body = msgspec.json.encode({"choices": [{"message": {"content": "Paris."}, "finish_reason": "stop"}]})
        for number in range(3):
            text, now = f"What is the capital of country {number}?", time.time()
            note = AnswerStored(0, f"a.{number}", "a.context", text, "m", "0.0.0", now, now + 60, body)
            await client.note(note)
        with pytest.raises(StoreUnavailable, match="not ready"):
            await client.ask(StatsRequest(), Stats)  # so the notes have been read
        goes_on.set()
        await until(are_learned)
    finally:
        goes_on.set()
        serving.cancel()
        await asyncio.wait([serving])


async def test_what_was_said_before_a_connection_is_cut_counts(folder: Path, minilm: Encoder) -> None:
    """A gateway that is killed has sent a part of its last message; those before it are handled to their end."""
    body = msgspec.json.encode({"choices": [{"message": {"content": "Paris."}, "finish_reason": "stop"}]})
    async with open_service(_config(socket=str(folder / "s")), lambda *_: minilm) as service:

        async def are_kept(entries: int, partitions: int) -> bool:
            described = await service.handle(StatsRequest())
            assert isinstance(described, Stats)
            return (described.figures["entries"], described.figures["partitions"]) == (entries, partitions)

        _, writer = await asyncio.open_unix_connection(folder / "s")
        for number in range(20):
            text, now = f"What is the capital of country {number}?", time.time()
            note = AnswerStored(0, f"a.{number}", "a.context", text, "m", "0.0.0", now, now + 60, body)
            writer.write(line_of(0, note))
        await until(lambda: are_kept(20, 1))
        writer.write(b"".join(line_of(0, EntryDeleted(f"a.{number}")) for number in range(20)) + b'[0, ["forg')
        writer.close()
        await until(lambda: are_kept(0, 0))


async def test_the_guide_names_every_figure(folder: Path, minilm: Encoder) -> None:
    """That of a new process, beside which there are counts of what has happened."""
    async with open_service(_config(socket=str(folder / "s")), lambda *_: minilm) as service:
        described = await service.handle(StatsRequest())
    assert isinstance(described, Stats)
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "semantic-cache.md").read_text(encoding="utf-8")
    assert {name for name in described.figures if f"`{name}" not in guide} == set()


@pytest.mark.parametrize(
    ("coefficient", "other"),
    [
        ("INTERCEPT", 1.0),
        ("COEFFICIENTS", dict.fromkeys(fitted.COEFFICIENTS, 1.0)),
        ("SAME_ABOVE", 9.0),
        ("DISAGREEMENT", 1.0),
        ("DISAGREEMENT_OF_SCORE", 1.0),
    ],
)
def test_a_judge_that_is_fitted_anew_shares_no_pairs_with_the_former(
    monkeypatch: pytest.MonkeyPatch, coefficient: str, other: object
) -> None:
    """What showed the former's errors says nothing of its own; a model's name does not depend on the fit."""
    embedding, model = _config("embedding"), _config("http://judge/v1", "a-model")
    before = judge_name(embedding, "encoder"), judge_name(model, "encoder")
    assert before == (judge_name(embedding, "encoder"), "judge:http://judge/v1:a-model")
    monkeypatch.setattr(fitted, coefficient, other)
    assert judge_name(embedding, "encoder") != before[0]
    assert judge_name(model, "encoder") == before[1]
    assert judge_name(embedding, "another") != judge_name(embedding, "encoder")
