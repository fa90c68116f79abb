"""Forms are read so that only equal forms are equal, in linear time and without a copy."""

import asyncio
import io
import os
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import FormData, web
from aiohttp.test_utils import TestServer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from gateway.errors import InvalidRequest
from gateway.http.multipart import MAX_HEADER_BYTES, MAX_PARTS, Part, multipart_fields, text_of

TYPE = "multipart/form-data; boundary=B"
FORM = (
    b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    b"\r\n--\0\xff\r\n--B--\r\n"
)

names = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"], exclude_characters='"\\'), max_size=8)
types = st.sampled_from(["", "audio/wav", "text/plain; charset=utf-8", 'a/b; c="d;e"'])
others = st.dictionaries(st.sampled_from(["content-length", "x-a", "content-disposition; size"]), names.map(str.strip))
contents = st.binary(max_size=20) | st.sampled_from([b"\r\n--", b"\r\n", b"\r\n--b--\r\n", b"--", b"\r\n\r\n"])
parts = st.builds(
    lambda name, filename, kind, rest, content: Part(
        name, filename, kind, tuple(sorted(rest.items())), memoryview(content)
    ),
    names,
    st.none() | names,
    types,
    others,
    contents,
)
forms = st.lists(parts, max_size=4)


def encode(form: list[Part], boundary: str, turn: int = 0) -> bytes:
    """A form as the body with this boundary, with the headers of each part in another order for each `turn`."""
    body = b""
    for part in form:
        disposition = f'Content-Disposition: form-data; name="{part.name}"'
        if part.filename is not None:
            disposition += f'; filename="{part.filename}"'
        rest = []
        for name, value in part.others:
            if name.startswith("content-disposition; "):
                disposition += f'; {name.partition("; ")[2]}="{value}"'
            else:
                rest.append(f"{name}: {value}")
        lines = [disposition, *([f"Content-Type: {part.content_type}"] if part.content_type else []), *rest]
        turned = lines[turn % len(lines) :] + lines[: turn % len(lines)]
        body += b"--%s\r\n%s\r\n\r\n%s\r\n" % (boundary.encode(), "\r\n".join(turned).encode(), part.content)
    return body + f"--{boundary}--\r\n".encode()


@given(forms, st.sampled_from(["boundary-1", "----=_Part:'(1)/?", "x" * 70]), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_a_form_is_read_as_it_was_written(form: list[Part], boundary: str, turn: int) -> None:
    """The parts of a form are the same for any boundary and any order of the headers within a part."""
    for content_type in (f'multipart/form-data; boundary="{boundary}"', f"Multipart/Form-Data;boundary={boundary}"):
        assert multipart_fields(content_type, encode(form, boundary, turn)) == form


def test_what_differs_is_different() -> None:
    """A change to any name, header, content or place of a part gives other parts."""
    part = Part("a", "f", "t/p", (("x", "1"),), memoryview(b"c"))
    changed = [
        [part],
        [part._replace(name="A")],
        [part._replace(filename=None)],
        [part._replace(filename="")],
        [part._replace(content_type="")],
        [part._replace(content_type="t/P")],
        [part._replace(others=(("x", "2"),))],
        [part._replace(others=(("content-disposition; x", "1"),))],
        [part._replace(content=memoryview(b"c\r\n"))],
        [part, part],
        [part, part._replace(name="b")],
        [part._replace(name="b"), part],
        [],
    ]
    read = [multipart_fields(TYPE, encode(form, "B")) for form in changed]
    assert read == changed
    assert all(one != other for at, one in enumerate(read) for other in read[:at])
    digests = {part.digest for form in read for part in form}
    assert len(digests) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["file", "model", "a b", "ü", '"']),
            st.none() | st.sampled_from(["a.wav", 'ü".x']),
            contents,
        )
    )
)
@settings(max_examples=50, deadline=None)
def test_aiohttps_forms_are_read(fields: list[tuple[str, str | None, bytes]]) -> None:
    """A form of aiohttp's client has the parts that were added to it, whatever boundary it chose."""

    async def body() -> tuple[str, bytes]:
        form = FormData(default_to_multipart=True)
        for name, filename, content in fields:
            form.add_field(name, io.BytesIO(content), filename=filename or "file", content_type="audio/wav")
        payload = form()
        return payload.headers["Content-Type"], await payload.as_bytes()

    one, other = asyncio.run(body()), asyncio.run(body())
    if fields:
        assert one != other
    assert multipart_fields(*one) == multipart_fields(*other)
    assert [bytes(part.content) for part in multipart_fields(*one)] == [content for _, _, content in fields]
    assert {part.content_type for part in multipart_fields(*one)} <= {"audio/wav"}


async def test_the_openai_clients_forms_are_read() -> None:
    """A transcription request of OpenAI's client gives its fields and its file, equally each time."""
    bodies: list[tuple[str, bytes]] = []

    async def transcribe(request: web.Request) -> web.Response:
        bodies.append((request.headers["Content-Type"], await request.read()))
        return web.json_response({"text": "hello"})

    application = web.Application()
    application.router.add_post("/v1/audio/transcriptions", transcribe)
    async with TestServer(application) as server:
        client = AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="any")
        for _ in range(2):
            answer = await client.audio.transcriptions.create(
                file=("a.wav", b"RIFF\r\n--\0"),
                model="whisper-1",
                temperature=0.2,
                response_format="verbose_json",
                timestamp_granularities=["word", "segment"],
            )
            assert answer.text == "hello"

    assert bodies[0] != bodies[1]
    one, other = (multipart_fields(*body) for body in bodies)
    assert one == other
    assert text_of(one, "model") == "whisper-1"
    assert text_of(one, "temperature") == "0.2"
    assert text_of(one, "seed") is None
    assert [part.text for part in one if part.name == "timestamp_granularities[]"] == ["word", "segment"]
    file = next(part for part in one if part.name == "file")
    assert (file.filename, file.content_type, bytes(file.content)) == ("a.wav", "audio/x-wav", b"RIFF\r\n--\0")


def test_plain_fields_are_text() -> None:
    """A field is given as its text; a repeated one, or one that is not UTF-8, is refused by name."""
    form = [Part("a", None, "", (), memoryview("ü".encode())), Part("b", None, "", (), memoryview(b"\xff"))]
    assert text_of(form, "a") == "ü"
    with pytest.raises(InvalidRequest, match="'b' must be text in UTF-8"):
        text_of(form, "b")
    with pytest.raises(InvalidRequest, match="'a' is there twice") as caught:
        text_of([*form, form[0]], "a")
    assert caught.value.param == "a"


def test_an_encoded_name_counts() -> None:
    """A field named in the form of RFC 8187 alone has no name, and the encoded name counts."""
    one, other, named = (
        multipart_fields(TYPE, FORM.replace(b'name="model"', name))[0]
        for name in (b"name*=utf-8''model", b"name*=utf-8''m", b"name=\"\"; name*=utf-8''model")
    )
    assert (one.name, one.others) == (None, (("content-disposition; name*", "utf-8''model"),))
    assert len({one, other, named}) == 3


def test_a_name_of_a_file_may_have_any_bytes() -> None:
    """The name of a file in another charset than UTF-8 is read, and differs from the same name in UTF-8."""
    one, other = (FORM.replace(b"a.wav", name) for name in (b"\xe9.wav", "é.wav".encode()))
    assert multipart_fields(TYPE, one)[1].filename == "\udce9.wav"
    assert multipart_fields(TYPE, one) != multipart_fields(TYPE, other)


@pytest.mark.parametrize(
    "disposition",
    [
        b'form-data; name="file"; filename="a.wav"',
        b"FORM-DATA;name=file;\tfilename=a.wav ",
        b' form-data; NAME="file"; Filename="a.wav"',
    ],
)
def test_white_space_and_quotes_do_not_count(disposition: bytes) -> None:
    """White space and quotes around the values of a header do not change the parts."""
    body = FORM.replace(b' form-data; name="file"; filename="a.wav"', disposition)
    assert multipart_fields(TYPE, body) == multipart_fields(TYPE, FORM)


def test_a_form_may_end_without_a_line_break() -> None:
    """The line break after the last boundary is optional, and a form may have no parts."""
    assert multipart_fields(TYPE, FORM[:-2]) == multipart_fields(TYPE, FORM)
    assert multipart_fields(TYPE, b"--B--") == []


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=B; boundary=C",
        'multipart/form-data; boundary="B',
        "multipart/form-data; boundary=B; charset=latin-1",
        "multipart/form-data; boundary=" + "B" * 71,
        "multipart/form-data; boundary=Bü",
        'multipart/form-data; boundary="B "',
        "multipart/mixed; boundary=B",
        "application/json",
        "multipart/form-data boundary=B",
    ],
)
def test_a_content_type_of_no_form_is_refused(content_type: str) -> None:
    """A Content-Type that is not multipart/form-data in UTF-8 with one valid boundary is refused."""
    with pytest.raises(InvalidRequest, match=r"^The (Content-Type|charset) .*must"):
        multipart_fields(content_type, FORM)


START = "it must start with '--' and the boundary"
BREAK = "a line break must follow the boundary before part"
BLANK_LINE = "must end with a blank line within 8192 bytes"
END = "must end with a line break and the boundary"
LAST = "nothing must follow the last boundary"
HEADERS = "must be one line, and there once"
NAME = "must have the header 'Content-Disposition: form-data"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (FORM, b"", START),
        (FORM, b"--C\r\n", START),
        (FORM, b'{"model": "m"}', START),
        (FORM, b"text\r\n" + FORM, START),
        (FORM, b"\r\n" + FORM, START),
        (FORM, b"--B", BREAK),
        (b"\r\n", b"\n", BREAK),
        (b"--B--\r\n", b"--B-\r\n", BREAK),
        (b"--B--\r\n", b"--BB--\r\n", BREAK),
        (b"\r\n--B\r\n", b"\r\n--B \r\n", BREAK),
        (b"--B--\r\n", b"--B\r\n", BLANK_LINE),
        (b"Content-Type: audio/wav", b"X: " + b"x" * MAX_HEADER_BYTES, BLANK_LINE),
        (b"--B--\r\n", b"", END),
        (b"\r\n--B--\r\n", b"\n--B--\r\n", END),
        (b"--B--\r\n", b"--B--\r\ntext", LAST),
        (b"--B--\r\n", b"--B--\r\n\r\n", LAST),
        (b"Content-Disposition", b" Content-Disposition", HEADERS),
        (b"Content-Disposition:", b"Content-Disposition :", HEADERS),
        (b"Content-Type: audio/wav", b"Content-Disposition: form-data; name=a", HEADERS),
        (b"Content-Type: audio/wav", b"Content-Type: a/b\r\ncontent-type: c/d", HEADERS),
        (b"Content-Type: audio/wav", b"Content-Type: a/b\nX: c", HEADERS),
        (b"Content-Type: audio/wav", b"Content-Type: a/b\0", HEADERS),
        (b"Content-Type: audio/wav", b"Content-Type", HEADERS),
        (b'Content-Disposition: form-data; name="model"', b"", HEADERS),
        (b"Content-Disposition", b"X", NAME),
        (b"form-data", b"attachment", NAME),
        (b"form-data", b"", NAME),
        (b'name="model"', b"name=a; name=b", NAME),
        (b'name="model"', b'name="model', NAME),
        (b'name="model"', b"name=", NAME),
        (b'name="model"', b"filename=a", NAME),
        (b'name="model"', b'name="model" x', NAME),
    ],
)
def test_a_body_that_is_no_form_is_refused(old: bytes, new: bytes, reason: str) -> None:
    """A body that readers of forms could take differently, or not at all, is refused, and the error says why."""
    body = FORM.replace(old, new)
    assert body != FORM
    with pytest.raises(InvalidRequest, match=rf"multipart/form-data that its Content-Type says: .*{reason}"):
        multipart_fields(TYPE, body)


@given(
    st.lists(
        st.tuples(st.integers(0, len(FORM)), st.integers(0, 4), st.binary(max_size=2) | st.sampled_from([b"--B", b'"']))
    ),
    st.text(max_size=10),
)
@example([(0, 0, b"")], "\udcff")
@settings(max_examples=300, deadline=None)
def test_any_body_is_read_or_refused(edits: list[tuple[int, int, bytes]], suffix: str) -> None:
    """A damaged form gives parts or InvalidRequest, and no other error."""
    body = FORM
    for at, removed, added in edits:
        body = body[:at] + added + body[at + removed :]
    for content_type in (TYPE, TYPE + suffix, suffix):
        try:
            form = multipart_fields(content_type, body)
        except InvalidRequest as error:
            form = []
            answered = error.body()
            assert answered
        assert all(part.digest for part in form)


def test_the_number_of_parts_is_limited() -> None:
    """A form has as many parts as MAX_PARTS, and one with more is refused."""
    part = Part("a", None, "", (), memoryview(b""))
    assert len(multipart_fields(TYPE, encode([part] * MAX_PARTS, "B"))) == MAX_PARTS
    with pytest.raises(InvalidRequest, match="more than 1000 parts"):
        multipart_fields(TYPE, encode([part] * (MAX_PARTS + 1), "B"))


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1])
def test_the_headers_of_a_part_are_limited(size: int) -> None:
    """The headers of a part have as many bytes as MAX_HEADER_BYTES, and more are refused."""
    head = b"Content-Disposition: form-data; name=a\r\nX: "
    body = b"--B\r\n" + head.ljust(size, b"x") + b"\r\n\r\n\r\n--B--"
    if size <= MAX_HEADER_BYTES:
        assert len(multipart_fields(TYPE, body)) == 1
    else:
        with pytest.raises(InvalidRequest, match="within 8192 bytes"):
            multipart_fields(TYPE, body)


BOUNDARY = "b" * 70
HEAD = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
# Content that begins like the boundary again and again.
HOSTILE = [b"\r\n--" + b"b" * 69, b"\r\n", b"\r\n--", b"b", b"\r\n--" + b"b" * 35]


def seconds_for(piece: bytes, size: int) -> float:
    body = b"%s%s\r\n--%s--" % (HEAD, piece * (size // len(piece)), BOUNDARY.encode())
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        assert len(multipart_fields(f"multipart/form-data; boundary={BOUNDARY}", body)) == 1
        best = min(best, time.process_time() - began)
    return best


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_form_takes_linear_time(piece: bytes) -> None:
    """A form takes time in proportion to its length, whatever its content begins like."""
    times = [seconds_for(piece, size) for size in (2**20, 2**22, 2**24)]
    # Reading the longest four times over would take a second; a busy machine adds some milliseconds.
    assert all(more < 12 * less + 0.02 for less, more in pairwise(times)), times


def test_a_large_file_is_not_copied() -> None:
    """Reading a form of 100 MB and hashing its file takes less than 64 KiB of memory."""
    content: Any = os.urandom(2**20) * 100
    body = b"%s%s\r\n--%s--" % (HEAD, content, BOUNDARY.encode())
    tracemalloc.start()
    try:
        (file,) = multipart_fields(f"multipart/form-data; boundary={BOUNDARY}", body)
        assert len(file.digest) == 32
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()
    assert file.content == content
