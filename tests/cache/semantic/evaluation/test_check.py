"""The semantic cache's part of `keepgate doctor`: what would compute the vectors here."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.errors import NativeUnavailable
from cache.semantic.embedding.model_files import models_folder
from cache.semantic.evaluation import check
from tests.cache.semantic.embedding.embedding_server import EmbeddingsApi, embedding_server


@pytest.fixture
async def encoder_server(minilm: Encoder) -> AsyncIterator[EmbeddingsApi]:
    async with embedding_server(minilm) as api:
        yield api


def found(capsys: pytest.CaptureFixture[str], model: str, folder: Path) -> list[dict[str, str]]:
    check.main(check.Asked(model, str(folder)))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_known_model_is_loaded_and_timed(minilm: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    """As the service does it, with the comparison of its vectors with the reference's."""
    (only,) = found(capsys, "default", models_folder())
    assert f"{minilm.name}, {minilm.dimensions} dimensions: " in only["summary"]
    assert "ms for a short question" in only["summary"]
    assert (only["status"], "kernels, whose vectors are those" in only["summary"]) in [("ok", True), ("warning", False)]


def test_a_slower_runtime_is_a_warning_with_its_reason(
    minilm: Encoder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the compiled encoder is passed over, torch computes, and the reason is told."""

    def unavailable(cache: Path) -> None:
        raise NativeUnavailable("no C++ compiler (g++, or what CXX names) on PATH")

    monkeypatch.setattr("cache.semantic.embedding.native.encoder.native_library", unavailable)
    (only,) = found(capsys, "default", models_folder())
    assert only["status"] == "warning"
    assert "computed by torch" in only["summary"]
    assert "g++" in only["advice"]


def test_a_model_that_is_not_there_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the message of a start, which names the setting."""
    (only,) = found(capsys, str(tmp_path / "none"), tmp_path)
    assert (only["status"], only["summary"].startswith("semantic.model: ")) == ("problem", True)


def test_an_unknown_model_is_only_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without a reference is looked for, and the kernels are built."""
    there, kernels = found(capsys, "default", tmp_path)
    assert (there["status"], "is compared with torch at the first start" in there["summary"]) == ("ok", True)
    assert kernels["status"] in ("ok", "warning")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".so"] == []


async def test_a_server_is_asked_as_the_service_asks_it(
    encoder_server: EmbeddingsApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding has its vectors' length and its time; one that takes most of the deadline is a warning."""
    monkeypatch.setenv("KEEPGATE_SEMANTIC_MODEL_KEY", "sk-x")
    for deadline, status in ((60.0, "ok"), (1e-6, "warning")):
        await asyncio.to_thread(check.main, check.Asked("m", "", encoder_server.url, deadline=deadline))
        said = capsys.readouterr().out
        found = json.loads(said)
        assert found["status"] == status
        assert f"m at 127.0.0.1:{encoder_server.port}, 384 dimensions: " in found["summary"]
        assert "sk-x" not in said
    assert "semantic.deadline" in found["advice"]
    assert set(encoder_server.keys) == {"Bearer sk-x"}


async def test_a_server_that_does_not_answer_is_a_problem(
    encoder_server: EmbeddingsApi, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason, and the settings that lead there."""
    encoder_server.status = 401
    await asyncio.to_thread(check.main, check.Asked("m", "", encoder_server.url))
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], "status 401" in found["summary"]) == ("problem", True)
    assert "semantic.model_url" in found["advice"]
