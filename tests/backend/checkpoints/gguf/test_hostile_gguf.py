"""An invalid GGUF file is refused in one line that names the file and the fault, before memory is allocated for it."""

from __future__ import annotations

import fcntl
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from backend.checkpoints.gguf.convert import convert_gguf
from backend.checkpoints.gguf.header import read_gguf
from backend.checkpoints.tensor_store import TensorStore
from backend.errors import ModelError
from backend.model_loader.source import resolve_model
from tests.backend.conftest import quiet

U8, U32, I32, F32, STRING, ARRAY, U64, F64 = 0, 4, 5, 6, 8, 9, 10, 12
FORMS = {U8: "B", U32: "I", I32: "i", F32: "f", U64: "Q", F64: "d"}
QUERY = "blk.0.attn_q.weight"
TOKENS = "tokenizer.ggml.tokens"


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(content: Any, kind: int | None = None) -> bytes:
    """A value with its type before it; the kind of a list is that of its items."""
    if isinstance(content, list):
        kind = kind or (STRING if isinstance(content[0], str) else I32 if isinstance(content[0], int) else F32)
        items = [text(item) if kind == STRING else struct.pack(f"<{FORMS[kind]}", item) for item in content]
        return struct.pack("<IIQ", ARRAY, kind, len(content)) + b"".join(items)
    if isinstance(content, str | bytes):
        return struct.pack("<I", STRING) + text(content)
    kind = kind or (F32 if isinstance(content, float) else I32 if content < 0 else U32)
    return struct.pack(f"<I{FORMS[kind]}", kind, content)


@dataclass
class Tensor:
    """What a file states of a tensor, right or wrong."""

    shape: tuple[int, ...]
    type: int = 0
    offset: int | None = None
    data: bytes = b""


@dataclass
class Draft:
    """A whole model with one layer, which a test changes into an invalid one."""

    fields: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    head: bytes = b"GGUF" + struct.pack("<I", 3)
    counts: tuple[int | None, int | None] = (None, None)
    end: int | None = None

    def header(self) -> bytes:
        tensors, fields = self.counts
        counted = len(self.tensors) if tensors is None else tensors, len(self.fields) if fields is None else fields
        parts = [self.head, struct.pack("<QQ", *counted)]
        parts += [text(key) + content for key, content in self.fields.items()]
        offset = 0
        for name, one in self.tensors.items():
            sizes = struct.pack(f"<{len(one.shape)}Q", *reversed(one.shape))
            where = offset if one.offset is None else one.offset
            parts.append(text(name) + struct.pack("<I", len(one.shape)) + sizes)
            parts.append(struct.pack("<IQ", one.type, where))
            offset += -(-len(one.data) // 32) * 32
        return b"".join(parts)

    def save(self, path: Path) -> Path:
        header = self.header()
        blocks = [one.data.ljust(-(-len(one.data) // 32) * 32, b"\0") for one in self.tensors.values()]
        path.write_bytes((header.ljust(-(-len(header) // 32) * 32, b"\0") + b"".join(blocks))[: self.end])
        return path


def floats(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(shape, data=np.random.default_rng(seed).standard_normal(shape).astype(np.float32).tobytes())


def model(size: int = 64) -> Draft:
    """Llama with a hidden size of 32 and a vocabulary of four.

    Args:
        size: of the MLP.
    """
    fields: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": 32,
        "llama.feed_forward_length": size,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        TOKENS: ["a", "b", "ab", "<end>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
    }
    tensors = {
        "token_embd.weight": floats(4, 32),
        "blk.0.attn_norm.weight": floats(32),
        QUERY: floats(32, 32),
        "blk.0.attn_k.weight": floats(16, 32),
        "blk.0.attn_v.weight": floats(16, 32),
        "blk.0.attn_output.weight": floats(32, 32),
        "blk.0.ffn_norm.weight": floats(32),
        "blk.0.ffn_gate.weight": floats(size, 32),
        "blk.0.ffn_up.weight": floats(size, 32),
        "blk.0.ffn_down.weight": floats(32, size),
        "output_norm.weight": floats(32),
    }
    return Draft({key: value(content) for key, content in fields.items()}, tensors)


def refusal(draft: Draft, tmp_path: Path) -> str:
    """The one line with which a file is refused, after its path."""
    path, target = draft.save(tmp_path / "model.gguf"), tmp_path / "converted"
    target.mkdir()
    with pytest.raises(ModelError) as refused:
        convert_gguf(path, target, quiet)
    before, _, said = str(refused.value).partition(f"{path}: ")
    assert not before
    assert said.isprintable()
    assert len(said) < 400
    return said


def test_the_unchanged_model_is_converted(tmp_path: Path) -> None:
    """The unchanged model is converted, so each refusal below is for its change."""
    convert_gguf(model().save(tmp_path / "model.gguf"), tmp_path, quiet, packed=True)
    assert set(TensorStore(tmp_path).names()) >= {"model.layers.0.self_attn.q_proj.weight", "model.norm.weight"}


def array_of_claimed_size(kind: int, count: int) -> dict[str, bytes]:
    return {"abc": struct.pack("<IIQ", ARRAY, kind, count)}


def test_random_damage_is_converted_or_refused(tmp_path: Path) -> None:
    """A header with changed, lost or added bytes is converted or refused, without another error."""
    draft, random = model(), np.random.default_rng(5)
    good, length = draft.save(tmp_path / "model.gguf").read_bytes(), len(draft.header())
    refused = []
    for _ in range(300):
        at, lost = int(random.integers(length)), int(random.choice([0, 1, 1, 1, 8]))
        added = random.bytes(int(random.choice([0, 1, 1, 1, 8])))
        (tmp_path / "damaged.gguf").write_bytes(good[:at] + added + good[at + lost :])
        try:
            convert_gguf(tmp_path / "damaged.gguf", tmp_path, quiet)
        except ModelError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert all(said.isprintable() for said in refused)


HEADERS = {
    "empty": (Draft(end=0), "not a readable GGUF file"),
    "text": (Draft(head=b"hello wo"), "it does not begin with 'GGUF'"),
    "version": (Draft(head=b"GGUF" + struct.pack("<I", 9)), "version 9, expected one of"),
    "big-endian": (Draft(head=b"GGUF" + struct.pack(">I", 3)), "little-endian"),
    "array of numbers": (
        Draft(array_of_claimed_size(U8, 2**60)),
        "metadata 'abc': 1152921504606846976 bytes at byte 51",
    ),
    "array of strings": (Draft(array_of_claimed_size(STRING, 2**60)), "metadata 'abc': 9223372036854775808 bytes"),
    "longest array": (Draft(array_of_claimed_size(U8, 2**64 - 1)), "metadata 'abc': 18446744073709551615 bytes"),
    "nested arrays": (
        Draft({"abc": struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000}),
        "metadata 'abc': an array of something else than numbers or strings",
    ),
    "long string": (Draft({"abc": struct.pack("<IQ", STRING, 2**63)}), "metadata 'abc': 9223372036854775808 bytes"),
    "many keys": (
        Draft(counts=(0, 2**62)),
        "metadata '': 4 bytes at byte 32, expected at most the 0 left of what the file has",
    ),
    "many tensors": (Draft(counts=(2**62, 0)), "tensor '': 4 bytes at byte 32"),
    "unknown type": (Draft({"ab": struct.pack("<II", 99, 4)}), "metadata 'ab': type 99"),
    "not UTF-8": (Draft({"general.name": value(b"\xff\xfe")}), "metadata 'general.name': 'utf-8' codec"),
    "key twice": (
        Draft({"ab": value(4) + text("ab") + value(5)}, counts=(0, 2)),
        "metadata 'ab' is there twice",
    ),
    "key in red": (
        Draft({"\x1b[31m\n" + "x" * 500: struct.pack("<I", 99)}),
        r"metadata '\x1b[31m\nxxxxx",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_invalid_headers_are_refused(case: str, tmp_path: Path) -> None:
    """An invalid header is refused; its counts and lengths are compared with the file's size first."""
    draft, message = HEADERS[case]
    said = refusal(draft, tmp_path)
    assert said.startswith("not a readable GGUF file (")
    assert message in said


@pytest.mark.parametrize("end", [4, 10, 24, 100, 600, 2000, -100])
def test_truncated_files_are_refused(end: int, tmp_path: Path) -> None:
    """A file that ends early is refused, wherever it ends."""
    draft = model()
    draft.end = end
    assert refusal(draft, tmp_path).startswith("not a readable GGUF file (")


def test_headers_have_a_size_limit(tmp_path: Path) -> None:
    """A header over the size limit is refused even if a sparse file is large enough for it."""
    path = Draft(array_of_claimed_size(U8, 2**33)).save(tmp_path / "model.gguf")
    with path.open("ab") as file:
        file.truncate(2**34)
    with pytest.raises(ModelError, match="left of what a header may have"):
        read_gguf(path)


TENSORS: dict[str, tuple[Tensor, str]] = {
    "beyond the end": (Tensor((32, 32), offset=2**40), r"'blk.0.attn_q.weight' ends at byte 1099"),
    "wraps around": (Tensor((32, 32), offset=2**64 - 64), r"ends at byte 18446744073709"),
    "not aligned": (Tensor((32, 32), offset=5), "offset 5, expected a multiple of 32"),
    "another's": (Tensor((32, 32), offset=0), "begins within another one"),
    "huge": (Tensor((2**32, 2**32)), "ends at byte 73786976294838"),
    "empty": (Tensor((0, 32)), r"shape \[0, 32\], expected positive sizes"),
    "no sizes": (Tensor(()), "0 sizes, expected 1 to 4"),
    "many sizes": (Tensor((1,) * 9), "9 sizes, expected 1 to 4"),
    "unknown type": (Tensor((32, 32), type=999), "type 999, which is not known"),
    "half a block": (Tensor((32, 32), type=14), r"shape \[32, 32\], expected .* rows of whole Q6_K blocks"),
    "flat": (floats(1024), r"has shape \[1024\], expected \[32, 32\]"),
    "deep": (floats(2, 16, 32), r"has shape \[2, 16, 32\], expected \[32, 32\]"),
    "odd rows": (floats(31, 32), r"has shape \[31, 32\], expected \[32, 32\]"),
    "single": (floats(1), r"has shape \[1\], expected \[32, 32\]"),
    "not finite": (Tensor((32, 32), data=np.full(1024, np.nan, np.float32).tobytes()), "that is not a finite number"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_invalid_tensors_are_refused(case: str, tmp_path: Path) -> None:
    """A tensor outside the file, over another one, or with a wrong shape, type or value is refused by name."""
    tensor, message = TENSORS[case]
    draft = model()
    tensor.data = tensor.data or draft.tensors[QUERY].data
    draft.tensors[QUERY] = tensor
    said = refusal(draft, tmp_path)
    assert "tensor 'blk.0.attn_q.weight'" in said
    assert re.search(message, said)


@pytest.mark.parametrize("kind", ["I8", "I16", "I32", "I64", "F64", "Q8_K"])
def test_tensor_types_that_hold_no_weights_are_refused(kind: str, tmp_path: Path) -> None:
    """A weight in a GGUF type that holds no weights is refused."""
    draft, of = model(256), GGMLQuantizationType[kind]
    elements, size = GGML_QUANT_SIZES[of]
    draft.tensors["blk.0.ffn_down.weight"] = Tensor((32, 256), of.value, data=bytes(32 * 256 // elements * size))
    assert f"'blk.0.ffn_down.weight' is of type {kind}, which is not a weight's" in refusal(draft, tmp_path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_blocks_with_scales_that_are_not_finite_are_refused(kind: str, tmp_path: Path) -> None:
    """A packed block with a NaN or infinite scale is refused."""
    draft, of = model(256), GGMLQuantizationType[kind]
    elements, size = GGML_QUANT_SIZES[of]
    draft.tensors["blk.0.ffn_down.weight"] = Tensor((32, 256), of.value, data=b"\xff" * (32 * 256 // elements * size))
    with pytest.raises(ModelError, match=r"'blk.0.ffn_down.weight' holds a value or a scale that is not a finite"):
        convert_gguf(draft.save(tmp_path / "model.gguf"), tmp_path, quiet, packed=True)


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("blk.{a}.attn_q.weight", "'blk.{a}.attn_q.weight'"),
        ("blk.{0:9999999999}.attn_q.weight", "'blk.{0:9999999999}.attn_q.weight'"),
        ("blk.bias", "'blk.bias'"),
        ("blk.{.attn_q.weight", "'blk.{.attn_q.weight'"),
        ("blk.00.attn_q.weight", "'blk.00.attn_q.weight'"),
        ("blk.1.attn_q.weight", "'blk.1.attn_q.weight'"),
        ("blk.0.attn_q_norm.weight", "'blk.0.attn_q_norm.weight'"),
        ("blk.0\n.attn_q.weight", r"'blk.0\n.attn_q.weight'"),
        ("blk.\x1b[31m\u202e.attn_q.weight", r"'blk.\x1b[31m\u202e.attn_q.weight'"),
        ("9" * 5000, f"'{'9' * 100}'…"),
        ("", "''"),
    ],
)
def test_unknown_tensor_names_are_refused_and_quoted(name: str, quoted: str, tmp_path: Path) -> None:
    """A tensor name that the architecture does not have is refused, and quoted without control characters."""
    draft = model()
    draft.tensors[name] = floats(32, 32)
    assert refusal(draft, tmp_path) == f"tensor {quoted} has no place in a llama decoder of 1 layers"


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    """A missing tensor is named as in the file."""
    draft = model()
    del draft.tensors[QUERY]
    assert refusal(draft, tmp_path) == "tensor 'blk.0.attn_q.weight' is missing"


def test_a_bias_of_one_projection_alone_is_refused(tmp_path: Path) -> None:
    """A bias of one attention projection without the others is refused, as a config has all or none."""
    draft = model()
    draft.tensors["blk.0.attn_q.bias"] = floats(32)
    assert refusal(draft, tmp_path) == "tensor 'blk.0.attn_k.bias' is missing"


COUNT = "a whole number from 1 to 2147483647"
IDS = "a token id from 0 to 3"
FIELDS: list[tuple[str, Any, str]] = [
    *(
        ("llama.attention.head_count", wrong, f"{wrong!r}, expected {COUNT}")
        for wrong in (0, "x", [4, 4], -4, 2**32 - 1, 4.0)
    ),
    ("llama.attention.head_count_kv", [2, 2], f"[2, 2], expected {COUNT}"),
    ("llama.attention.head_count_kv", 0, f"0, expected {COUNT}"),
    ("llama.attention.head_count_kv", 3, "3, expected a divisor of the 4 heads of queries"),
    ("llama.embedding_length", "x", f"'x', expected {COUNT}"),
    ("llama.embedding_length", 0, f"0, expected {COUNT}"),
    ("llama.block_count", 2**31 - 1, "2147483647, expected fewer layers than there are tensors, 11"),
    ("llama.feed_forward_length", [1, 2], f"[1, 2], expected {COUNT}"),
    ("llama.context_length", 0, f"0, expected {COUNT}"),
    *(
        ("llama.attention.layer_norm_rms_epsilon", wrong, f"{wrong!r}, expected a positive number")
        for wrong in ("x", float("nan"), float("inf"), -1.0, 0.0, [1.0])
    ),
    ("llama.rope.freq_base", "x", "'x', expected a positive number"),
    ("llama.rope.dimension_count", 4, "4, expected the size of a head, 8"),
    ("llama.rope.scaling.type", 3, "3, expected a string"),
    ("llama.rope.scaling.type", "yarn", "'yarn', expected 'none' or 'linear'"),
    ("llama.expert_count", "x", f"'x', expected {COUNT}"),
    ("general.architecture", 3, "3, expected one of llama, "),
    ("general.architecture", "x" * 5000, f"'{'x' * 100}'…, expected one of llama, "),
    ("general.alignment", 3, "3, expected a power of two"),
    (TOKENS, 3, "3, expected a list of strings"),
    (TOKENS, [1, 2, 3, 4], "[1, 2, 3, 4], expected a list of strings"),
    (TOKENS, ["a", "b", "c", "d"], "merges has 'a b', expected two tokens that make a third"),
    ("tokenizer.ggml.token_type", [1, 2], "[1, 2], expected a list of 4 numbers, one for each token"),
    ("tokenizer.ggml.token_type", 1, "1, expected a list of 4 numbers, one for each token"),
    ("tokenizer.ggml.merges", ["ab"], "merges has 'ab', expected two tokens that make a third"),
    ("tokenizer.ggml.merges", ["a zz"], "merges has 'a zz', expected two tokens that make a third"),
    ("tokenizer.ggml.merges", ["b a"], "merges has 'b a', expected two tokens that make a third"),
    ("tokenizer.ggml.merges", [1], "[1], expected a list of strings"),
    ("tokenizer.ggml.merges", 5, "5, expected a list of strings"),
    *(("tokenizer.ggml.eos_token_id", wrong, f"{wrong!r}, expected {IDS}") for wrong in (4, 10**9, -1, "x", [3])),
    ("tokenizer.ggml.bos_token_id", 10**9, f"1000000000, expected {IDS}"),
    ("tokenizer.ggml.eot_token_id", "x", f"'x', expected {IDS}"),
    ("tokenizer.ggml.model", ["x"], "['x'], expected a string"),
    ("tokenizer.ggml.pre", "\x1b[31m", r"tokenizer 'gpt2' with pre-tokenizer '\x1b[31m' is not supported"),
    ("tokenizer.chat_template", 5, "5, expected a string"),
    ("split.count", 3, "3, expected 1: the whole model in one file"),
    ("split.count", [1], "[1], expected 1: the whole model"),
]


@pytest.mark.parametrize(("key", "wrong", "message"), FIELDS, ids=[f"{key}={wrong!r:.20}" for key, wrong, _ in FIELDS])
def test_invalid_metadata_are_refused(key: str, wrong: Any, message: str, tmp_path: Path) -> None:
    """Invalid metadata are refused with the key, the value and what would be right."""
    draft = model()
    draft.fields[key] = value(wrong)
    said = refusal(draft, tmp_path)
    assert message in said
    assert key.rpartition(".")[2] in said or "tokenizer" in said


@pytest.mark.parametrize("key", ["llama.embedding_length", "llama.block_count", TOKENS, "tokenizer.ggml.token_type"])
def test_missing_metadata_are_named(key: str, tmp_path: Path) -> None:
    """Missing metadata are named with what is expected of them."""
    draft = model()
    del draft.fields[key]
    assert refusal(draft, tmp_path).startswith(f"metadata {key} is missing, expected ")


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("scores", [0.0, 1.0], "[0.0, 1.0], expected a list of 4 numbers, one for each token"),
        ("scores", [0, 0, 0, 0], "[0, 0, 0, 0], expected a list of 4 numbers, one for each token"),
        ("scores", [float("nan")] * 4, "[nan, nan, nan, nan], expected a list of 4 numbers, one for each token"),
        ("scores", "x", "'x', expected a list of 4 numbers, one for each token"),
        ("unknown_token_id", 4, f"4, expected {IDS}"),
        ("unknown_token_id", "x", f"'x', expected {IDS}"),
    ],
)
def test_invalid_sentencepiece_metadata_are_refused(key: str, wrong: Any, message: str, tmp_path: Path) -> None:
    """Invalid scores and token ids of a SentencePiece tokenizer are refused with the key and the value."""
    draft = model()
    fields = {"model": "llama", "scores": [0.0, 0.0, -1.0, 0.0], key: wrong}
    draft.fields |= {f"tokenizer.ggml.{name}": value(content) for name, content in fields.items()}
    assert refusal(draft, tmp_path) == f"metadata tokenizer.ggml.{key} is {message}"


def test_a_bos_token_with_a_colon_is_refused(tmp_path: Path) -> None:
    """A beginning token that the tokenizers library's template syntax cannot express is refused."""
    draft = model()
    draft.fields[TOKENS] = value(["a", "b", "ab", "x:y"])
    draft.fields |= {"tokenizer.ggml.bos_token_id": value(3), "tokenizer.ggml.add_bos_token": value(1)}
    assert "bos_token_id is 3, expected a token that a text can begin with, not 'x:y'" in refusal(draft, tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_full_disk_names_the_converted_file(name: str, tmp_path: Path) -> None:
    """A full disk is one line that names the GGUF file."""
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted" / name).symlink_to("/dev/full")
    path = model().save(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"its conversion cannot be written to \S+ \(No space left on device\)"):
        convert_gguf(path, tmp_path / "converted", quiet)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of conversions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "keepgate" / "models").mkdir(parents=True)
    return tmp_path / "home" / "keepgate" / "models"


def test_files_that_differ_only_at_their_end_are_two_models(tmp_path: Path, models: Path) -> None:
    """Files of one name and size that differ at their end are two models, and a moved file is not converted again."""
    draft = model(2**15)
    served = []
    for directory, seed in (("one", 0), ("two", 1)):
        (tmp_path / directory).mkdir()
        draft.tensors["output_norm.weight"] = floats(32, seed=seed)
        path = draft.save(tmp_path / directory / "model.gguf")
        assert path.stat().st_size > 9 * 2**20
        found = resolve_model(str(path), quiet)
        served.append(TensorStore(found.directory).raw("model.norm.weight").tolist())
    assert served[0] != served[1]
    (tmp_path / "two").rename(tmp_path / "three")
    said: list[str] = []
    assert resolve_model(str(tmp_path / "three" / "model.gguf"), said.append) == found
    assert not said


def test_leftovers_of_killed_conversions_are_removed(tmp_path: Path, models: Path) -> None:
    """The next conversion removes what killed conversions left, and leaves the folder of a running one."""
    path = model().save(tmp_path / "model.gguf")
    own = resolve_model(str(path), quiet).directory
    own.rename(models / f".{own.name}-12345678")
    for name in (".gone-v3-abcdefgh", ".runs-v4-abcdefgh", ".other"):
        (models / name / "inside").mkdir(parents=True)
    with (models / "runs-v4.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert resolve_model(str(path), quiet).directory == own
    left = {entry.name for entry in models.iterdir() if entry.is_dir()}
    assert left == {own.name, ".runs-v4-abcdefgh", ".other"}


def test_a_refused_file_leaves_nothing(tmp_path: Path, models: Path) -> None:
    """A file that is refused leaves no conversion behind, and the message names the user's file."""
    draft = model()
    draft.fields["llama.block_count"] = value(2)
    path = draft.save(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf: tensor 'blk\.1\.attn_norm\.weight' is missing"):
        resolve_model(str(path), quiet)
    assert not [entry for entry in models.iterdir() if entry.is_dir()]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be written is one line with file and cache, and a long file name is no error."""
    path = model().save(tmp_path / f"{'x' * 240}.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert resolve_model(str(path), quiet).directory.is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"x\.gguf: its conversion cannot be written to .*/file/\S+ \(Not a directory"):
        resolve_model(str(path), quiet)
