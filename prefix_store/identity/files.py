"""Digests of weight and tokenizer files, by their contents."""

import asyncio
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from prefix_store.identity.encoding import encoded

_WHOLE_UP_TO = 4 * 2**30
_CHUNK = 2**20
_PAGE = 4096
_STRIDE = 4 * 2**20
_LARGEST_HEADER = 100 * 2**20  # what safetensors itself accepts


async def digest_of_files(paths: Sequence[Path]) -> bytes:
    """16 bytes (XXH3-128) that change with the files' names or contents. Reads in a thread.

    Folders and times do not count, and nothing is cached between starts: a file that was replaced by another of the
    same name, size and time has another digest. All bytes are read if the files have at most 4 GiB together
    (about a second from the page cache).

    Larger models, which cannot be read completely at every start, are sampled: of every file the size, the first MiB
    and a page of 4 KiB every 4 MiB up to its last; of a safetensors file also the header and of every tensor its first,
    middle and last page. That detects training, merging, converting and quantising, which change every page of a
    tensor. It misses changes of single bytes between the pages, in a damaged or edited file.

    Raises OSError if a file cannot be read, ValueError if there are none or two of one name.
    """
    return await asyncio.to_thread(_digest, paths)


def _digest(paths: Sequence[Path]) -> bytes:
    files = sorted(paths, key=lambda path: path.name)
    if not files:
        raise ValueError("no files were given, expected those of a model's weights or of its tokenizer")
    for one, other in itertools.pairwise(files):
        if one.name == other.name:
            raise ValueError(f"two files are called {one.name}: {one} and {other}; expected one of each name")
    sizes = [path.stat().st_size for path in files]
    whole = sum(sizes) <= _WHOLE_UP_TO
    digest = xxhash.xxh3_128()
    for path, size in zip(files, sizes, strict=True):
        digest.update(encoded([path.name, size, "whole" if whole else "sample"]))
        with path.open("rb", buffering=0) as file:
            read = 0
            for offset, length in [(0, size)] if whole else _sample(file.fileno(), size):
                for piece in _pieces(file.fileno(), offset, length):
                    digest.update(piece)
                    read += len(piece)
            # A file that shrinks while it is read gets a digest that no unchanged file has.
            digest.update(encoded(read))
    return digest.digest()


def _pieces(descriptor: int, offset: int, length: int) -> Iterator[bytes]:
    while length > 0 and (piece := os.pread(descriptor, min(length, _CHUNK), offset)):
        yield piece
        offset += len(piece)
        length -= len(piece)


def _sample(descriptor: int, size: int) -> Iterable[tuple[int, int]]:
    """(offset, length) of what is read of a file, in order."""
    yield 0, min(size, _CHUNK)
    for offset in range(0, size, _STRIDE):
        yield offset, _PAGE
    yield max(0, size - _PAGE), _PAGE
    yield from _tensors(descriptor, size)


def _tensors(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The header of a safetensors file and three pages of each tensor; nothing of other files."""
    header_length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= header_length <= min(size - 8, _LARGEST_HEADER):
        return
    try:
        tensors = msgspec.json.decode(b"".join(_pieces(descriptor, 8, header_length)), type=dict[str, _Tensor])
    except msgspec.DecodeError:
        return
    yield 8, header_length
    start = 8 + header_length
    for _, tensor in sorted(tensors.items()):
        if tensor.data_offsets is None:  # __metadata__
            continue
        first, end = (start + offset for offset in tensor.data_offsets)
        if not start <= first <= end <= size:  # a damaged file; the digest has its header and size
            continue
        for offset in (first, (first + end) // 2, max(first, end - _PAGE)):
            yield offset, min(_PAGE, max(0, end - offset))


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] | None = None
