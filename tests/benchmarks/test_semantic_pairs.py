"""The files of pairs that the benchmark of the semantic cache is given."""

from pathlib import Path

import pytest

from benchmarks.harness.processes import CannotMeasure
from benchmarks.semantic.pairs import pairs_of
from cache.semantic.evaluation.rows import LabelledPair


def test_a_file_of_pairs_is_read_and_another_one_refused(tmp_path: Path) -> None:
    """The message names the file, and says what would be right."""
    pairs, stream = tmp_path / "pairs.csv", tmp_path / "stream.csv"
    pairs.write_text("text_a,text_b,label\nWho?,Who is it?,1\n", encoding="utf-8")
    stream.write_text("question,answer_id\nWho?,7\n", encoding="utf-8")
    assert pairs_of(pairs) == [LabelledPair("Who?", "Who is it?", same=True)]
    with pytest.raises(CannotMeasure, match=r"stream\.csv: has a stream of questions; it must have the columns text_a"):
        pairs_of(stream)
    with pytest.raises(CannotMeasure, match=r"none\.csv: cannot be read"):
        pairs_of(tmp_path / "none.csv")
