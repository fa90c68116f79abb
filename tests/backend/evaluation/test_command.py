"""``keepgate eval``: its output and its messages for bad input."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from backend.engine.config import EngineConfig
from backend.errors import ModelError
from backend.evaluation.evaluate import EvaluationConfig, evaluate_model
from backend.evaluation.perplexity import Evaluation, Loss
from backend.evaluation.report import Report, as_json, as_text
from tests.backend.conftest import built_library, quiet
from tests.backend.random_models import KINDS, VOCABULARY, of_vectors, save

WORDS = [f"w{number}" for number in range(VOCABULARY)]
TEXT = " ".join(WORDS[3:] * 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer of one token a word."""
    return made(tmp_path_factory.mktemp("model"), WORDS)


def made(directory: Path, words: list[str]) -> Path:
    save(of_vectors(KINDS["smollm2"], intermediate_size=320), directory)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def asked(model: Path, text: str = TEXT, **others: object) -> EvaluationConfig:
    engine = EngineConfig(threads=1)
    values = {"text_name": "text.txt", "reference": None, "engine": engine, "window": 64, "stride": 32, "limit": None}
    return EvaluationConfig(str(model), text=text, **{**values, **others})  # type: ignore[arg-type] # of whatever types they are


def evaluated(question: EvaluationConfig) -> Report:
    return evaluate_model(question, quiet, lambda done, of, surprise: None)


async def command(*words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backend.commands.eval", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_command_reports_an_int8_model_in_json(model: Path, tmp_path: Path) -> None:
    """The command's JSON compares a model in int8 with its float weights, and progress goes to stderr."""
    built_library()
    (tmp_path / "text.txt").write_text(TEXT)
    words = (str(model), "--text", str(tmp_path / "text.txt"), "--quantization", "int8", "--threads", "1", "--json")
    status, out, err = await command(*words, "--limit", "200", "--window", "64", "--stride", "40")
    assert (status, "Traceback" in err) == (0, False)
    assert f"loading {model.name}" in err
    figures = json.loads(out)
    assert figures.keys() >= {
        *("tokens", "window", "stride", "perplexity", "reference_perplexity", "kl_mean", "kl_p99", "top1_agreement"),
        *("bits_per_weight", "weight_bytes", "scheme", "runner", "seconds"),
    }
    assert (figures["tokens"], figures["window"], figures["stride"]) == (200, 64, 40)
    assert figures["model"] == figures["reference"] == model.name
    assert figures["scheme"] == "int8"
    assert figures["runner"] != figures["reference_runner"]
    assert 0 < figures["kl_mean"] < figures["kl_p99"] < 0.1
    assert 0.7 < figures["top1_agreement"] <= 1
    assert figures["perplexity"] == pytest.approx(figures["reference_perplexity"], rel=0.05)
    assert figures["schemes"] == {"int8": 4 * 7, "int8-g64": 1}
    assert 8 < figures["bits_per_weight"] < 8.5


def test_a_float_model_is_compared_with_nothing(model: Path) -> None:
    """A float model without `--reference` has null comparison figures."""
    report = evaluated(asked(model))
    figures = as_json(report)
    assert figures["tokens"] == len(TEXT.split()) - 1
    assert figures["reference"] is figures["kl_mean"] is figures["reference_perplexity"] is None
    assert figures["bits_per_weight"] == 16 if "fused" in figures["runner"] else 32
    assert "compared with     nothing" in as_text(report)


def test_a_model_is_compared_with_its_reference(model: Path, tmp_path: Path) -> None:
    """A model is compared with the reference directory, and has no loss against equal weights."""
    report = evaluated(asked(model, reference=str(made(tmp_path, WORDS)), limit=100))
    assert report.evaluation.tokens == 100
    assert report.evaluation.loss is not None
    assert report.evaluation.loss.kl_mean == pytest.approx(0, abs=1e-6)
    assert report.evaluation.loss.top1_agreement == 1


def test_a_model_of_other_tokens_is_no_reference(model: Path, tmp_path: Path) -> None:
    """A reference with another vocabulary is refused."""
    other = made(tmp_path, [*WORDS[1:], WORDS[0]])
    with pytest.raises(ModelError, match=f"--reference: {other.name} has other tokens than {model.name}"):
        evaluated(asked(model, reference=str(other)))


def test_a_token_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    """A text with a token beyond the model's embedding is refused with the token and the number of rows."""
    directory = made(tmp_path, [*WORDS, "extra"])
    with pytest.raises(
        ModelError, match=f"token 'extra' of id {VOCABULARY}, but the model's embedding has {VOCABULARY} rows"
    ):
        evaluated(asked(directory, "w3 w4 extra"))


def test_a_text_of_one_token_is_too_short(model: Path) -> None:
    """A text of one token is refused, as nothing precedes it."""
    with pytest.raises(ModelError, match=r"text\.txt: too short: 1 token .* expected 2 or more"):
        evaluated(asked(model, "w7"))


def test_a_window_beyond_the_models_context_is_refused(model: Path) -> None:
    """A window beyond the model's context is refused with the longest one."""
    with pytest.raises(ModelError, match=r"--window: 257 tokens are more than the 256"):
        evaluated(asked(model, window=257))


def test_the_table_states_what_was_measured() -> None:
    """The table states window, stride, perplexity, its rise over the reference in per cent, KL and bits."""
    report = Report(
        *("Model", "text.txt", "int8", "fused-int8", "Model", "fused-float16", 512, 256),
        Evaluation(2000, 20.2, Loss(20.0, 0.00612, 0.027, 0.956), 28.9),
        *({"int8": 211}, 8.05, 1_006_000),
    )
    text = as_text(report)
    assert "Model on text.txt: 2,000 tokens in windows of 512, stride 256" in text
    assert "perplexity        20.2000" in text
    assert "20.0000, so +1.000%" in text
    assert "0.00612 nats per token, p99 0.02700" in text
    assert "95.60%" in text
    assert "weights           211 in int8" in text
    assert "8.05 bits each, 1.0 MB" in text
