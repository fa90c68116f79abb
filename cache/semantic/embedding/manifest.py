"""The manifest of an exported model: how its texts become tokens, its reference, and checksums."""

from pathlib import Path

import msgspec
import xxhash

from cache.semantic.embedding.errors import ExportUnavailable
from cache.semantic.embedding.model_files import add_file

FORMAT = 1
"""Of the files below. Another one is another export."""

MODEL_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"
REFERENCE_FILE = "reference.npy"
REFUSAL_FILE = "refusal.txt"
_MANIFEST_FILE = "manifest.json"


class Manifest(msgspec.Struct, frozen=True):
    """Of one folder of exported files."""

    inputs: list[str]
    """Names of the graph's inputs, in its order: of input_ids, attention_mask and token_type_ids."""
    longest: int | None
    """Tokens of a text, with special ones; None if the model has no limit."""
    cuts_left: bool
    prompt: str
    """Put before every text."""
    pad_id: int
    pad_type_id: int
    pads_left: bool
    texts: list[str]
    """Of the reference; its vectors are float32 [len(texts), dimensions] in the file of reference."""
    checksums: dict[str, str] = {}
    """XXH3-128, hex, of each other file of the folder."""


class Damaged(Exception):
    """Damaged files of an export."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it last: a folder without it is incomplete."""
    checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    body = msgspec.json.encode(msgspec.structs.replace(manifest, checksums=checksums))
    (folder / _MANIFEST_FILE).write_bytes(xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, every file of which was compared with its checksum.

    Raises Damaged, or ExportUnavailable if the folder has the reason why there is no export.
    """
    refusal = folder / REFUSAL_FILE
    if refusal.is_file():
        raise ExportUnavailable(f"{refusal.read_text('utf-8', 'replace')} (remove {folder} to try the export again)")
    try:
        checksum, _, body = (folder / _MANIFEST_FILE).read_bytes().partition(b"\n")
        if xxhash.xxh3_128_hexdigest(body).encode() != checksum:
            raise Damaged(f"{folder / _MANIFEST_FILE} fails its checksum")
        manifest = msgspec.json.decode(body, type=Manifest)
        for name, expected in manifest.checksums.items():
            if _checksum(folder / name) != expected:
                raise Damaged(f"{folder / name} fails its checksum")
    except (OSError, msgspec.DecodeError) as error:
        raise Damaged(str(error)) from error
    return manifest


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    add_file(digest, path)
    return digest.hexdigest()
