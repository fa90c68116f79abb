"""The checks of input files, for all inputs."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batches.input_file import MAX_ERRORS, MAX_LINES, InputFile
from tests.gateway.batches.batch_client import CHAT, jsonl, request

_MAX_LINE = 2000

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
_LINES = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.sampled_from(["a", "b", ""]) | _JSON,
        "method": st.sampled_from(["POST", "post"]) | _JSON,
        "url": st.sampled_from([CHAT, "/v1/embeddings"]) | _JSON,
        "body": st.dictionaries(st.sampled_from(["model", "stream", "x"]), _JSON) | _JSON,
        "extra": _JSON,
    },
)
_BYTES = (
    _LINES.map(lambda line: json.dumps(line).encode())
    | st.binary(max_size=60)
    | _JSON.map(lambda value: json.dumps(value).encode())
)


def scanned(path: Path, content: bytes) -> InputFile:
    path.write_bytes(content)
    batch_input = InputFile(path, CHAT, _MAX_LINE)
    for _ in batch_input.scan():
        pass
    return batch_input


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("input") / "input.jsonl"


@settings(deadline=None, max_examples=300)
@given(lines=st.lists(_BYTES, max_size=8), end=st.sampled_from([b"", b"\n", b"\r\n"]))
def test_every_line_is_a_request_or_an_error(path: Path, lines: list[bytes], end: bytes) -> None:
    """Whatever bytes a file has, each line that is not blank is counted or reported with its number, and no other."""
    content = b"\n".join(lines) + end
    with closing(scanned(path, content)) as batch_input:
        numbered = [number for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
        reported = [error.line for error in batch_input.errors if error.line is not None]
        assert batch_input.total + len(reported) == len(numbered)
        assert set(reported) <= set(numbered)
        assert all(error.message and error.code for error in batch_input.errors)
        assert bool(batch_input.errors) or batch_input.total > 0
        for _, custom_id, number in batch_input.requests():
            assert custom_id
            assert isinstance(json.loads(batch_input.body(number)), dict)


@settings(deadline=None, max_examples=100)
@given(bodies=st.lists(st.dictionaries(st.sampled_from("abc"), _JSON.filter(lambda v: v == v), max_size=3), max_size=6))
def test_lines_with_the_same_json_are_one_request(path: Path, bodies: list[dict[str, Any]]) -> None:
    """As many requests as there are different bodies, each with its number of lines, in whichever order their keys."""
    encoded = []
    for body in bodies:
        try:
            encoded.append(json.dumps(body, sort_keys=True, allow_nan=False))
            encoded[-1].encode()
        except ValueError:
            return
    lines = [{**request(str(n), ""), "body": dict(reversed(body.items()))} for n, body in enumerate(bodies)]
    with closing(scanned(path, jsonl(lines))) as batch_input:
        if batch_input.errors:
            return
        assert len(batch_input.digests) == len(set(encoded))
        assert sum(batch_input.copies) == len(bodies)
        for line, _, number in batch_input.requests():
            assert json.dumps(json.loads(batch_input.body(number)), sort_keys=True) == encoded[line]


def test_bodies_that_differ_in_type_are_different(path: Path) -> None:
    """1, 1.0, true and "1" are not the same to every server."""
    lines = [request(str(number), "x", value=value) for number, value in enumerate((1, 1.0, True, "1", None))]
    with closing(scanned(path, jsonl(lines))) as batch_input:
        assert len(batch_input.digests) == 5


def test_a_key_that_is_there_twice_is_an_error(path: Path) -> None:
    """Servers differ in which of the two they use."""
    line = b'{"custom_id":"a","method":"POST","url":"%s","body":{"model":"x","model":"y"}}' % CHAT.encode()
    with closing(scanned(path, line)) as batch_input:
        assert [error.code for error in batch_input.errors] == ["invalid_json_line"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_of_the_longest_length(path: Path, end: bytes) -> None:
    """One byte more is an error of that line; the lines after it keep their numbers."""
    line = jsonl([request("a", "xx")]).rstrip()
    longest = line.replace(b"xx", b"x" * (2 + _MAX_LINE - len(line)))
    assert len(longest) == _MAX_LINE
    with closing(scanned(path, longest + end)) as batch_input:
        assert batch_input.errors == []
        assert batch_input.body(0) in longest
    content = longest.replace(b"xx", b"xxx", 1) + (end or b"\n") + b"{" * 3_000_000 + b"\n{}\n"
    with closing(scanned(path, content)) as batch_input:
        assert [(error.line, error.code) for error in batch_input.errors] == [
            (1, "line_too_long"),
            (2, "line_too_long"),
            (3, "missing_required_parameter"),
        ]


def test_deep_nesting_is_an_error(path: Path) -> None:
    """No depth ends the process."""
    deep = b"[" * 800 + b"]" * 800
    line = b'{"custom_id":"a","method":"POST","url":"%s","body":{"x":%s}}' % (CHAT.encode(), deep)
    with closing(scanned(path, line)) as batch_input:
        assert batch_input.total + len(batch_input.errors) == 1


def test_a_file_has_a_largest_number_of_lines(path: Path) -> None:
    """50,000 lines are a batch, one more is an error that names the line."""
    lines = b"".join(
        b'{"custom_id":"%d","method":"POST","url":"%s","body":{}}\n' % (n, CHAT.encode()) for n in range(MAX_LINES)
    )
    with closing(scanned(path, lines)) as batch_input:
        assert batch_input.errors == []
        assert batch_input.total == MAX_LINES
        assert len(batch_input.digests) == 1
    with closing(scanned(path, lines + lines[:60])) as batch_input:
        assert [(error.line, error.code) for error in batch_input.errors] == [(MAX_LINES + 1, "too_many_lines")]


def test_the_list_of_errors_is_bounded(path: Path) -> None:
    """Of many invalid lines the first are listed, and the number of the others."""
    with closing(scanned(path, b"x\n" * (MAX_ERRORS + 7))) as batch_input:
        assert len(batch_input.errors) == MAX_ERRORS + 1
        assert batch_input.errors[-1].message == "7 more lines are invalid."


def test_threads_read_bodies_at_the_same_time(path: Path) -> None:
    """Each gets the body that it asks for."""
    lines = [request(str(number), f"{number} " + "x" * (number % 700)) for number in range(2000)]
    with closing(scanned(path, jsonl(lines))) as batch_input, ThreadPoolExecutor(8) as pool:
        bodies = pool.map(batch_input.body, range(2000))
        assert [json.loads(body) for body in bodies] == [line["body"] for line in lines]


def test_the_model_is_that_of_all_lines(path: Path) -> None:
    """There is none where they differ, or where it is no text."""
    for models, expected in ((["m", "m"], "m"), (["m", "n"], None), ([["m"], ["m"]], None)):
        lines = [request(str(number), "x", model=model) for number, model in enumerate(models)]
        with closing(scanned(path, jsonl(lines))) as batch_input:
            assert batch_input.model == expected
