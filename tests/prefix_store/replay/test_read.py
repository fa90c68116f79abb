"""Traces of all styles, and invalid files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from prefix_store.replay.read import read_trace
from prefix_store.replay.trace import TraceError, TraceRequest

TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "traces"
GOOD = {"timestamp": 2000, "input_length": 1000, "output_length": 7, "hash_ids": [0, 1]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, text: str, packed: bool = False) -> Path:
    file = folder / "trace"
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return file


def faults(file: Path) -> list[str]:
    with pytest.raises(TraceError) as raised:
        read_trace(file)
    return raised.value.lines


@pytest.mark.parametrize("packed", [False, True])
def test_a_mooncake_trace_plain_or_gzip(tmp_path: Path, packed: bool) -> None:
    """Milliseconds become seconds, and requests come in the order of time."""
    early = {"timestamp": 500, "input_length": 512, "output_length": 1, "hash_ids": [0]}
    trace = read_trace(write(tmp_path, f"{json.dumps(GOOD)}\n\n{json.dumps(early)}\n", packed))
    assert (trace.style, trace.block_tokens, trace.count) == ("mooncake", 512, 2)
    assert list(trace.requests()) == [TraceRequest(0.5, 512, 1, [0]), TraceRequest(2.0, 1000, 7, [0, 1])]


def test_an_agent_trace(tmp_path: Path) -> None:
    """Numbers of two conversations differ, a sub-agent's clock begins with it, a user continues with the next one."""
    first = {
        "block_size": 64,
        "requests": [
            {"t": 0.0, "in": 200, "out": 5, "keep": 0, "new": [[1, 2], [9, 1]]},
            {"t": 5.0, "requests": [{"t": 2.0, "in": 64, "out": 1, "keep": 0, "new": [[20, 1]]}]},
            {"t": 6.0, "in": 300, "out": 6, "keep": 2, "new": [[10, 2]]},
        ],
    }
    second = {"block_size": 64, "requests": [{"t": 0.0, "in": 64, "out": 8, "keep": 0, "new": [[1, 1]]}]}
    trace = read_trace(write(tmp_path, f"{json.dumps(first)}\n{json.dumps(second)}\n"))
    assert (trace.style, trace.block_tokens, trace.count) == ("agent", 64, 4)
    assert list(trace.requests()) == [
        TraceRequest(0.0, 200, 5, [1, 2, 9]),
        TraceRequest(6.0, 300, 6, [1, 2, 10, 11]),
        TraceRequest(7.0, 64, 1, [20]),
        TraceRequest(8.0, 64, 8, [22]),
    ]


def test_users_of_an_agent_trace_begin_together(tmp_path: Path) -> None:
    """A user has eleven conversations in sequence; the twelfth is the first one of the next user."""
    requests = [{"t": 0.0, "in": 64, "out": 8, "keep": 0, "new": [[0, 1]]}]
    line = json.dumps({"block_size": 64, "requests": requests})
    trace = read_trace(write(tmp_path, f"{line}\n" * 12))
    assert [(request.time, request.keys) for request in trace.requests()][:3] == [(0.0, [0]), (0.0, [11]), (1.0, [1])]


def test_an_azure_trace(tmp_path: Path) -> None:
    """It has arrivals and lengths, and no prefixes."""
    rows = "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.4951690,374,44\n"
    trace = read_trace(write(tmp_path, AZURE + rows))
    assert (trace.style, trace.has_prefixes) == ("azure", False)
    assert list(trace.requests()) == [TraceRequest(0.0, 374, 44, ()), TraceRequest(4.5, 396, 109, ())]


@pytest.mark.parametrize(
    ("name", "style", "count"),
    [
        ("mooncake_conversation.jsonl.gz", "mooncake", 12_031),
        ("coding_agent.jsonl.gz", "agent", 49_334),
        ("azure_2023_conv.csv.gz", "azure", 19_366),
        ("azure_2023_code.csv.gz", "azure", 8_819),
    ],
)
def test_the_published_traces_are_read(name: str, style: str, count: int) -> None:
    """Every published trace is read completely."""
    trace = read_trace(TRACES / name)
    assert (trace.style, trace.count) == (style, count)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_length": "many"}, "Expected `int`, got `str` - at `$.input_length`"),
        ({"timestamp": -1}, "timestamp is -1.0, expected at least 0"),
        ({"hash_ids": [0]}, "hash_ids has 1 numbers; 1000 tokens are 2 blocks of 512"),
        ({"hash_ids": [5, 1]}, "hash_ids: 1 stands for another prefix in an earlier place"),
        ({"hash_ids": [0, 0]}, "hash_ids: 0 stands for another prefix in an earlier place"),
    ],
)
def test_a_bad_line_of_a_mooncake_trace_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """The message has the line's number and what is expected; valid lines have none."""
    file = write(tmp_path, "".join(json.dumps(line) + "\n" for line in (GOOD, GOOD | change, GOOD)))
    (message,) = faults(file)
    assert message.startswith(f"{file} line 2: ")
    assert says in message


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"t": 1.0, "in": 5, "out": 5, "keep": 9, "new": []}, "request 2: keep is 9, the request before has 3 blocks"),
        ({"t": 1.0, "in": 5, "out": 5, "keep": 0, "new": [[2, 1]]}, "request 2: block 2 stands for another prefix"),
        ({"t": 1.0, "in": 5, "out": 5, "keep": 3, "new": [[7, -1]]}, "request 2: new has [7, -1]"),
        ({"t": 1.0, "in": -5, "out": 5, "keep": 3, "new": []}, "request 2: in or out is negative"),
        ({"t": 1.0}, "request 2: has neither keep nor requests"),
        ({"in": 5}, "`t`"),
    ],
)
def test_a_bad_line_of_an_agent_trace_is_named(tmp_path: Path, request_: dict[str, Any], says: str) -> None:
    """The message has the line and the request in it."""
    first = {"t": 0.0, "in": 200, "out": 5, "keep": 0, "new": [[1, 3]]}
    lines = [{"block_size": 64, "requests": [first]}, {"block_size": 64, "requests": [first, request_]}]
    (message,) = faults(write(tmp_path, "".join(json.dumps(line) + "\n" for line in lines)))
    assert "line 2: " in message
    assert says in message


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("yesterday,1,2", "TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:50,x,2", "ContextTokens is 'x', expected a number of tokens"),
        ("2023-11-16 18:15:50,1", "has 2 fields, the header 3"),
    ],
)
def test_a_bad_line_of_an_azure_trace_is_named(tmp_path: Path, row: str, says: str) -> None:
    """The message has the line's number; the header is line 1."""
    (message,) = faults(write(tmp_path, f"{AZURE}{row}\n2023-11-16 18:15:50,1,2\n"))
    assert "line 2: " in message
    assert says in message


def test_each_bad_line_has_one_message_and_there_are_not_too_many(tmp_path: Path) -> None:
    """After twenty bad lines reading stops, with a message."""
    file = write(tmp_path, json.dumps(GOOD) + "\n" + "{}\n" * 50)
    messages = faults(file)
    assert [f"line {number}: " in message for number, message in zip(range(2, 22), messages, strict=False)] == [
        True
    ] * 20
    assert messages[20:] == [f"{file}: the rest was not read"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"hello\n", "is of no known style"),
        (b'{"prompt": "x"}\n', "is of no known style"),
        (b"{broken\n", "line 1: JSON is malformed"),
        (b"TIMESTAMP,ContextTokens\n", "the header lacks GeneratedTokens"),
        (b'{"hash_ids": "\xff"}\n', "line 1: expected UTF-8 text"),
        (gzip.compress(json.dumps(GOOD).encode(), mtime=0)[:-4], "damaged"),
        (b'{"block_size": 0, "requests": []}\n', "block_size is 0"),
        (b'{"block_size": 8, "requests": []}\n', "has no requests"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    """One message says what is expected."""
    file = tmp_path / "trace"
    file.write_bytes(content)
    (message,) = faults(file)
    assert message.startswith(str(file))
    assert says in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing file and a folder are named."""
    assert faults(tmp_path / "missing") == [f"{tmp_path / 'missing'}: cannot be read: No such file or directory"]
    assert faults(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]
