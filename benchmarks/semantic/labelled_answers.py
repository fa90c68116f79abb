"""The labelled answers of data/answers.jsonl as pairs that say the same or do not."""

import itertools
import random
import zlib
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

_DATA = Path(__file__).resolve().parents[1] / "data"
FILE = _DATA / "answers.jsonl"
LATER_FILE = _DATA / "answers-later.jsonl"
"""Never fitted to; but features, weights and limit of the judge were chosen with a view of what they give here."""
AFTERWARDS_FILE = _DATA / "answers-afterwards.jsonl"
"""Written from a description of the form alone, before the judge counted negations, and never fitted to."""
UNREPEATABLE_FILE = _DATA / "answers-unrepeatable.jsonl"
"""Answers that are no function of their question: of a group all to one question, and each says something else."""

_NEAR_SITUATIONS = 3
_OTHERS = 2


class Kind(Enum):
    """What two answers have to do with each other.

    `FREE` wordings of one answer were written to be as unlike as people's; those of `CHAT` are as like as one model's
    answers to two wordings of a question. `CONTRADICTING` answers are to the very same question, and one fact differs.
    `NEAR` answers are to questions that differ in what matters, `RELATED` to questions of the situations that are
    nearest, `OTHER` to any.
    """

    FREE = "same, free wordings"
    CHAT = "same, a model's wordings"
    CONTRADICTING = "contradicting, same question"
    NEAR = "near question"
    RELATED = "related question"
    OTHER = "other question"


SAME = (Kind.FREE, Kind.CHAT)
DIFFERENT = (Kind.CONTRADICTING, Kind.NEAR, Kind.RELATED, Kind.OTHER)
COMPARED = (Kind.NEAR, Kind.RELATED, Kind.OTHER)
"""What a cache in front of one upstream has the judge compare, which doesn't contradict itself."""


class Labelled(NamedTuple):
    """An answer; two of a group with the same fact say the same."""

    group: str
    fact: str
    question: str
    answer: str


class Pair(NamedTuple):
    """A fresh answer to its question, and a cached one to its own."""

    fresh: Labelled
    cached: Labelled
    kind: Kind


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: str
    fact: str
    question: str
    answers: tuple[str, ...]


def labelled(file: Path = FILE) -> list[Labelled]:
    """All answers of the file. Raises ValueError with file and line where one is not as it should be."""
    found: list[Labelled] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = msgspec.json.decode(line, type=_Row)
        except msgspec.DecodeError as error:
            raise ValueError(f"{file.name}, line {number}: {error}") from error
        found += [Labelled(row.group, row.fact, row.question, answer) for answer in row.answers]
    return found


def is_held_out(group: str) -> bool:
    """Two of five groups, by name: whole groups, because the answers of one have much in common."""
    return zlib.crc32(group.encode()) % 5 >= 3


def pairs(answers: Sequence[Labelled], questions: Mapping[str, npt.NDArray[np.float32]], seed: int = 0) -> list[Pair]:
    """Every ordered pair of each group, and some with answers of other groups, the nearest and any.

    `questions` are the embeddings of all questions, float32 [dimensions], which say what groups are near.
    """
    draw = random.Random(seed)  # noqa: S311  # no secret
    groups: dict[str, list[Labelled]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer)
    nearest = _nearest(groups, questions)
    found: list[Pair] = []
    for name, members in groups.items():
        found += [Pair(fresh, cached, _kind(fresh, cached)) for fresh, cached in itertools.permutations(members, 2)]
        for fresh in members:
            found += [Pair(fresh, draw.choice(groups[near]), Kind.RELATED) for near in nearest[name]]
            others = [other for other in draw.sample(answers, _OTHERS) if other.group != name]
            found += [Pair(fresh, other, Kind.OTHER) for other in others]
    return found


def _kind(fresh: Labelled, cached: Labelled) -> Kind:
    if fresh.fact == cached.fact:
        return Kind.FREE if fresh.question == cached.question else Kind.CHAT
    return Kind.CONTRADICTING if fresh.question == cached.question else Kind.NEAR


def _nearest(
    groups: Mapping[str, Sequence[Labelled]], questions: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, list[str]]:
    names = list(groups)
    means = np.array([np.mean([questions[member.question] for member in groups[name]], axis=0) for name in names])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    alike = means @ means.T
    np.fill_diagonal(alike, -1.0)
    return {
        name: [names[other] for other in np.argsort(-row)[:_NEAR_SITUATIONS]]
        for name, row in zip(names, alike, strict=True)
    }
