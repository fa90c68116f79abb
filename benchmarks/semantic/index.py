"""The semantic index, at four sizes and at a hundred thousand partitions: time, memory, and what its search misses.

As a program it makes one of the measurements, in a process of its own: `python -m benchmarks.semantic.index --rows
100000 --mixture mixture.npz`. Without `--rows` it prepares that file.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import msgspec
import numpy as np

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, run_on_subject_core
from benchmarks.semantic.intent_data import banking77, clinc150, embedded
from cache.semantic.index.index import VectorIndex
from cache.semantic.index.table import Floats, Rows

_SIZES = (1_000, 10_000, 100_000, 1_000_000)
_QUICK_SIZES = (1_000, 20_000)
_QUESTIONS = 1000
_NEIGHBOURS = 16
_REMOVALS = 2000
_PIECE = 10_000
_SETTLE_SECONDS = 1800.0
_LATER, _NOW = 2e9, 1e9
# Which vectors are mixed, and how much noise they get: see _METHOD.
_NEAR = 32
_FAR_SHARE = 0.3
_NOISE = 0.3
_METHOD = """\
One process and one core for each row, with the index alone. Base vectors are the embeddings of the questions of
Banking77 and CLINC150; a thousand of them, drawn by chance, are the questions that are searched for, and the others are
what entries are made of. Each entry is a random convex mix of a base vector with one of its 32 nearest (three times in
ten with any other), of which the first has the larger share, plus Gaussian noise of length .3, at length 1 again. The
cosine of a question to the nearest of a million such entries is as that to the nearest real one, and the second nearest
is much closer behind it, which is what makes recall hard. Sixteen neighbours are asked for. Recall is against the exact
search of the unrounded float32 vectors: at 1, whether the first is the right one; at 16, the share of the sixteen.
Memory is what anonymous pages of the process (RssAnon) grew by, ids of 32 characters included."""


class Measured(msgspec.Struct, kw_only=True):
    """What one process found. Times in ms, unless the name says otherwise."""

    searches: list[float]
    additions: list[float]
    removals: list[float]
    background_seconds: float
    settle_seconds: float
    recall_first: float
    recall_all: float
    rss_bytes: float
    own_bytes: float
    nearest: list[float]
    seconds_behind: list[float]


async def measure(quick: bool, base: Path | None = None) -> Figure:
    """`base` is a file of float32 unit vectors [n, d] to use in place of embedding the questions."""
    with tempfile.TemporaryDirectory() as folder:
        mixture = str(Path(folder, "mixture.npz"))
        given = ["--base", str(base)] if base is not None else []
        await _run("--mixture", mixture, *given, *(["--quick"] if quick else []))
        rows: list[Row] = []
        for size in _QUICK_SIZES if quick else _SIZES:
            rows += _rows_of_size(size, await _measured("--mixture", mixture, "--rows", str(size)))
        partitions = 1_000 if quick else 100_000
        many = await _measured("--mixture", mixture, "--rows", str(10 * partitions), "--partitions", str(partitions))
        rows += _rows_of_partitions(partitions, many)
    return Figure(figure="semantic_index", title="The semantic index", method=_METHOD, rows=tuple(rows))


def _rows_of_size(size: int, found: Measured) -> list[Row]:
    name = f"{size:,} entries in one partition"
    beside = {
        "p99 ms": _percentile(found.searches, 99),
        "add p50 ms": _percentile(found.additions, 50),
        "add p99 ms": _percentile(found.additions, 99),
        "add longest ms": max(found.additions),
        "remove p50 ms": _percentile(found.removals, 50),
        "remove p99 ms": _percentile(found.removals, 99),
        "CPU seconds in the background": found.background_seconds,
        "seconds from the last addition until all rows are in lists": found.settle_seconds,
        "cosine of the nearest, median": _percentile(found.nearest, 50),
        "the second behind it by, median": _percentile(found.seconds_behind, 50),
        "recall of all sixteen": found.recall_all,
        "bytes an entry by its own account": found.own_bytes / size,
    }
    time_target = Target("most", 5.0) if size == 1_000_000 else None
    return [
        Row(
            what=f"{name}: search, p50",
            unit="ms",
            rounds=(_percentile(found.searches, 50),),
            target=time_target,
            beside=(beside,),
        ),
        Row(what=f"{name}: recall@1", unit="", rounds=(found.recall_first,), target=Target("least", 0.99)),
        *(
            Row(
                what=f"{name}: memory an entry",
                unit="bytes",
                rounds=(found.rss_bytes / size,),
                target=Target("most", 2560.0),
            )
            for _ in range(size >= 100_000)  # below that FAISS's own first allocations are most of it
        ),
    ]


def _rows_of_partitions(partitions: int, found: Measured) -> list[Row]:
    name = f"{partitions:,} partitions of ten entries"
    beside = {
        "p99 ms": _percentile(found.searches, 99),
        "add p50 ms": _percentile(found.additions, 50),
        "add p99 ms": _percentile(found.additions, 99),
        "remove p50 ms": _percentile(found.removals, 50),
        "bytes an entry by its own account": found.own_bytes / (10 * partitions),
    }
    return [
        Row(what=f"{name}: search, p50", unit="ms", rounds=(_percentile(found.searches, 50),), beside=(beside,)),
        Row(
            what=f"{name}: memory an entry",
            unit="bytes",
            rounds=(found.rss_bytes / (10 * partitions),),
            target=Target("most", 2560.0),
        ),
    ]


def _percentile(values: list[float], percent: int) -> float:
    return float(np.percentile(values, percent))


async def _measured(*words: str) -> Measured:
    return msgspec.json.decode(await _run(*words), type=Measured)


async def _run(*words: str) -> bytes:
    return await run_on_subject_core("benchmarks.semantic.index", *words)


class Mixture:
    """Entries as hard to tell apart as those of people, in any number; the same ones each time they are made."""

    def __init__(self, questions: Floats, base: Floats, near: Rows) -> None:
        """`near` are the nearest of each base vector [n, d] but itself, int64 [n, k]."""
        self.questions, self._base, self._near = questions, base, near

    @classmethod
    def of(cls, vectors: Floats) -> "Mixture":
        shuffled = vectors[cls.order(len(vectors))]
        held_out = cls.held_out(len(vectors))
        questions, base = shuffled[:held_out], np.ascontiguousarray(shuffled[held_out:])
        flat = faiss.IndexFlatIP(base.shape[1])
        flat.add(base)
        return cls(questions, base, flat.search(base, _NEAR + 1)[1][:, 1:])

    @staticmethod
    def order(vectors: int) -> Rows:
        """In which the vectors are taken: first the questions, then the base."""
        return np.random.default_rng(0).permutation(vectors)

    @staticmethod
    def held_out(vectors: int) -> int:
        """How many of the vectors are questions."""
        return min(_QUESTIONS, vectors // 4)

    @classmethod
    def load(cls, file: Path) -> "Mixture":
        with np.load(file) as saved:
            return cls(saved["questions"], saved["base"], saved["near"])

    def save(self, file: Path) -> None:
        np.savez(file, questions=self.questions, base=self._base, near=self._near)

    def pieces(self, rows: int) -> Iterator[Floats]:
        """float32 unit vectors [≤ 10,000, d], `rows` in all."""
        return (piece for piece, _ in self.parted(rows))

    def parted(self, rows: int) -> Iterator[tuple[Floats, Rows]]:
        """As `pieces`, with the base vector by number that has the larger part in each of them, int64 [≤ 10,000]."""
        for start in range(0, rows, _PIECE):
            yield self._piece(min(_PIECE, rows - start), np.random.default_rng(start + 1))

    def _piece(self, rows: int, random: np.random.Generator) -> tuple[Floats, Rows]:
        first = random.integers(0, len(self._base), rows)
        second = self._near[first, random.integers(0, _NEAR, rows)]
        far = random.random(rows) < _FAR_SHARE
        second[far] = random.integers(0, len(self._base), int(far.sum()))
        share = random.random((rows, 1), np.float32) * np.float32(0.5)
        mixed = _units(self._base[first] * (np.float32(1) - share) + self._base[second] * share)
        noise = random.standard_normal(mixed.shape, np.float32)
        return _units(mixed + noise * np.float32(_NOISE / mixed.shape[1] ** 0.5)), first


def _units(vectors: Floats) -> Floats:
    normalised: Floats = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalised


class Exact:
    """The nearest sixteen by full comparison, of entries that come piece by piece."""

    def __init__(self, questions: Floats) -> None:
        self._questions = questions
        self._seen = 0
        self.cosines = np.full((len(questions), _NEIGHBOURS), -2, np.float32)
        self.rows = np.full((len(questions), _NEIGHBOURS), -1, np.int64)

    def see(self, piece: Floats) -> None:
        flat = faiss.IndexFlatIP(piece.shape[1])
        flat.add(piece)
        cosines, rows = flat.search(self._questions, min(_NEIGHBOURS, len(piece)))
        cosines = np.hstack([self.cosines, cosines])
        rows = np.hstack([self.rows, rows + self._seen])
        order = np.argsort(-cosines, axis=1, kind="stable")[:, :_NEIGHBOURS]
        self.cosines = np.take_along_axis(cosines, order, axis=1)
        self.rows = np.take_along_axis(rows, order, axis=1)
        self._seen += len(piece)


def measure_here(mixture: Mixture, rows: int, partitions: int) -> Measured:
    """One measurement, in this process. Recall is of a single partition only."""
    questions = mixture.questions
    exact = Exact(questions)
    for piece in mixture.pieces(rows) if partitions == 1 else ():
        exact.see(piece)
    index = VectorIndex(questions.shape[1])
    _warm_up(index, questions[0])
    names = [f"tenant.{number:032x}" for number in range(partitions)]
    before = _anonymous_bytes()
    process_before, thread_before = time.process_time(), time.thread_time()
    additions: list[float] = []
    for piece in mixture.pieces(rows):
        for vector in piece:
            number = len(additions)
            entry, partition = f"{number:032x}", names[number % partitions]
            additions.append(_milliseconds(index.add, partition, entry, vector, _LATER))
    del piece, vector
    began = time.monotonic()
    if not index.settle(_SETTLE_SECONDS):
        raise CannotMeasure(f"The index was still at work {_SETTLE_SECONDS:.0f} s after the last addition.")
    settled = time.monotonic() - began
    background = (time.process_time() - process_before) - (time.thread_time() - thread_before)
    # The times of the additions are the measurement's own.
    taken = _anonymous_bytes() - before - 32 * len(additions)
    searches, first, all_sixteen = [], 0, 0.0
    for number, question in enumerate(questions):
        began = time.perf_counter()
        found = index.search(names[number % partitions], question, _NEIGHBOURS, _NOW)
        searches.append(1000 * (time.perf_counter() - began))
        if partitions == 1:
            ids = [int(entry, 16) for entry, _ in found]
            first += bool(ids[0] == exact.rows[number, 0])
            all_sixteen += len(set(ids) & set(exact.rows[number].tolist())) / _NEIGHBOURS
    own = float(index.bytes)
    gone = np.random.default_rng(1).choice(rows, min(rows, _REMOVALS), replace=False).tolist()
    removals = [_milliseconds(index.remove, f"{number:032x}") for number in gone]
    index.close()
    return Measured(
        searches=searches,
        additions=additions if len(additions) <= 100_000 else _thinned(additions),
        removals=removals,
        background_seconds=background,
        settle_seconds=settled,
        recall_first=first / len(questions),
        recall_all=all_sixteen / len(questions),
        rss_bytes=float(taken),
        own_bytes=own,
        nearest=exact.cosines[:, 0].tolist(),
        seconds_behind=(exact.cosines[:, 0] - exact.cosines[:, 1]).tolist(),
    )


def _warm_up(index: VectorIndex, vector: Floats) -> None:
    """Let everything be allocated that is once for a process."""
    index.add("warm", "warm", vector, _LATER)
    index.search("warm", vector, _NEIGHBOURS, _NOW)
    index.remove("warm")


def _milliseconds(call: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    call(*arguments)
    return 1000 * (time.perf_counter() - began)


def _thinned(values: list[float]) -> list[float]:
    """The longest, and a sample of the others by chance."""
    return [max(values), *np.random.default_rng(0).choice(values, 50_000, replace=False).tolist()]


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    if found is None:
        raise CannotMeasure("/proc/self/status has no RssAnon: memory is measured on Linux only.")
    return int(found[1]) * 1024


def _embed(quick: bool) -> Floats:
    questions = banking77("test")
    if not quick:
        questions += banking77("train") + clinc150("train") + clinc150("test")
    with tempfile.TemporaryDirectory() as folder:
        # Equal texts have equal vectors: the second of them would have no single nearest neighbour.
        return embedded(sorted(set(questions.texts)), Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.semantic.index", description=__doc__)
    parser.add_argument("--mixture", type=Path, required=True, help="what entries are made of, .npz")
    parser.add_argument("--rows", type=int, help="how many entries; without it the file is written")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--base", type=Path, help="unit vectors to write it from, float32 [n, d], .npy")
    parser.add_argument("--quick", action="store_true", help="write it from a part of the questions")
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    if options.rows is None:
        Mixture.of(_embed(options.quick) if options.base is None else np.load(options.base)).save(options.mixture)
        return
    found = measure_here(Mixture.load(options.mixture), options.rows, options.partitions)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
