"""An image, audio or file in a message counts by its bytes and its type, however the request encodes them."""

import base64
import copy
import os
import re
import tracemalloc
from collections.abc import Callable
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.entries.key import Key, request_key

quick = settings(max_examples=100, deadline=None)

URL_PARTS = ("image_url", "video_url", "audio_url")
BASE64_PARTS = {"input_audio": "data", "file": "file_data"}

# Some whose base64 has the signs in which the alphabets differ, each padding, and bytes that look encoded themselves.
contents = st.binary(max_size=40) | st.sampled_from([b"", b"\xfb\xff", b"\xfb\xff\xbf", b"a", b"aa", b"%61", b"YWFh"])
url_parts = st.sampled_from(URL_PARTS)
base64_parts = st.sampled_from(sorted(BASE64_PARTS))


def key(*parts: Any, role: str = "user", **fields: Any) -> Key:
    message = {"role": role, "content": list(parts), **fields}
    return request_key("public", "chat.completions", {"model": "m", "messages": [message]})


def url_part(url: Any, field: str = "image_url", **other: Any) -> dict[str, Any]:
    return {"type": field, field: {"url": url, **other}}


def base64_part(text: Any, field: str = "file", **other: Any) -> dict[str, Any]:
    return {"type": field, field: {BASE64_PARTS[field]: text, **other}}


def standard(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{standard(content)}"


# Base64 of the same bytes.
BASE64_SPELLINGS: list[Callable[[bytes], str]] = [
    lambda content: standard(content).rstrip("="),
    lambda content: base64.urlsafe_b64encode(content).decode(),
    lambda content: base64.urlsafe_b64encode(content).decode().rstrip("="),
    lambda content: base64.encodebytes(content).decode(),
    lambda content: "\r\n".join(standard(content)) + " \t",
]
# Data URLs of the same bytes.
URL_SPELLINGS: list[Callable[[bytes], str]] = [
    *(lambda content, spell=spell: f"data:image/png;base64,{spell(content)}" for spell in BASE64_SPELLINGS),
    lambda content: "data:image/png;base64," + quote_from_bytes(base64.b64encode(content), safe=""),
    lambda content: "data:image/png;base64," + "".join(f"%{byte:02x}" for byte in base64.b64encode(content)) + "%0A",
    lambda content: "data:image/png," + quote_from_bytes(content, safe=""),
    lambda content: "data:image/png," + quote_from_bytes(content, safe="!$&'()*+,;=/:?@\"<>[]\\^`{|}"),
    lambda content: data_url(content, "IMAGE/Png"),
    lambda content: data_url(content, "image/png;charset=utf-8"),
    lambda content: data_url(content, "image/png; name=a.png;x"),
    lambda content: data_url(content, " image/png ").replace("data", "DATA", 1).replace(";base64", "; Base64"),
]


@given(contents, url_parts)
@quick
def test_the_encoding_of_a_data_url_does_not_count(content: bytes, field: str) -> None:
    """Every data URL of the same bytes and media type gives one key."""
    plain = key(url_part(data_url(content), field))
    assert {key(url_part(spell(content), field)) for spell in URL_SPELLINGS} == {plain}
    alone = key({"type": field, field: data_url(content)})
    assert {key({"type": field, field: spell(content)}) for spell in URL_SPELLINGS} == {alone}


@given(contents, base64_parts)
@quick
def test_the_encoding_of_base64_does_not_count(content: bytes, field: str) -> None:
    """Every base64 text of the same bytes gives one key for audio and files, and so does every data URL of them."""
    plain = key(base64_part(standard(content), field))
    assert {key(base64_part(spell(content), field)) for spell in BASE64_SPELLINGS} == {plain}
    typed = key(base64_part(data_url(content), field))
    assert {key(base64_part(spell(content), field)) for spell in URL_SPELLINGS} == {typed}
    assert typed != plain


@given(contents, contents)
@example(b"", b"\0")
@example(b"\0", b"\0\0")
@quick
def test_other_bytes_have_another_key(one: bytes, other: bytes) -> None:
    """Two files have equal keys exactly if their bytes are equal."""
    assert (key(url_part(data_url(one))) == key(url_part(data_url(other)))) == (one == other)
    assert (key(base64_part(standard(one))) == key(base64_part(standard(other)))) == (one == other)


def meaning(url: str) -> tuple[str, bytes] | str:
    """What a data URL of an image means, read step by step; other text as it is."""
    if not url.startswith("data:") or "," not in url:
        return url
    head, _, data = url.removeprefix("data:").partition(",")
    media_type, *parameters = head.split(";")
    if "base64" in parameters[:-1] or re.search("%(?![0-9A-Fa-f]{2})", data):
        return url
    content = unquote_to_bytes(data)
    if parameters[-1:] != ["base64"]:
        return url if re.search("[^!-~]|#", data) else (media_type, content)
    text = content.translate(None, b"\n")
    if not re.search(rb"[+/]", text):
        text = text.replace(b"-", b"+").replace(b"_", b"/")
    if not text.endswith(b"="):
        text += b"=" * (-len(text) % 4)
    if len(text) % 4 or not re.fullmatch(rb"[A-Za-z0-9+/]*={0,2}", text):
        return url
    return media_type, base64.b64decode(text)


data_urls = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["data:", "data", "", "https:", " data:"]),
    st.sampled_from(["", "image/png", "image/gif", ";base64", "image/png;base64", "image/png;base64;x"]),
    st.sampled_from([",", ",", ",", ""]),
    st.text("AQg=+/-_%2Bb\n#é", max_size=8),
)


@given(data_urls, data_urls)
@example("data:;base64,AAA=", "data:;base64,AAA==")
@example("data:;base64,QQ%", "data:;base64,QQ=")
@example("data:;base64,QQQ%", "data:;base64,QQQ=")
@example("data:;base64,AAAA====", "data:;base64,AAAA")
@example("data:;base64,Q", "data:;base64,")
@example("data:;base64,+_", "data:;base64,+/")
@example("data:image/png;base64;x,A", "data:image/png,A")
@example("data:,%3D", "data:,=")
@example("data:,%41", "data:,A")
@example("data:,A#", "data:,A%23")
@settings(max_examples=500, deadline=None)
def test_only_data_urls_of_one_meaning_share_a_key(one: str, other: str) -> None:
    """Two URLs have equal keys exactly if they are equal text, or valid data URLs of equal type and bytes."""
    assert (key(url_part(one)) == key(url_part(other))) == (meaning(one) == meaning(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (url_part(data_url(b"x")), url_part(data_url(b"x", "image/jpeg"))),
        (url_part(data_url(b"x")), url_part(data_url(b"x", ""))),
        (url_part(data_url(b"x")), url_part(data_url(b"x"), detail="low")),
        (url_part(data_url(b"x"), detail="high"), url_part(data_url(b"x"), detail="low")),
        (url_part(data_url(b"x")), url_part(data_url(b"x"), "video_url")),
        (url_part(data_url(b"x"), a="data:,x"), url_part(data_url(b"x"), a="data:,%78")),
        (base64_part("eA==", "input_audio", format="wav"), base64_part("eA==", "input_audio", format="mp3")),
        (base64_part("eA==", filename="a.pdf"), base64_part("eA==", filename="b.pdf")),
        (base64_part(data_url(b"x", "text/plain;charset=latin-1")), base64_part(data_url(b"x", "text/plain"))),
        (base64_part(data_url(b"x", "audio/ogg;codecs=opus")), base64_part(data_url(b"x", "audio/ogg;codecs=flac"))),
        (base64_part(data_url(b"x", "audio/L16;rate=8000")), base64_part(data_url(b"x", "audio/L16;rate=16000"))),
        (url_part(data_url(b"x", "image/\u212a")), url_part(data_url(b"x", "image/k"))),
        (url_part("https://a.example/x.png"), url_part("https://a.example/X.png")),
        (url_part("https://a.example/%41"), url_part("https://a.example/A")),
        # Base64 counts by its bytes where base64 is expected, and percent signs are escapes in a URL alone.
        (url_part("eA=="), url_part("eA")),
        (base64_part("eA%3D%3D"), base64_part("eA==")),
        (base64_part("https://a.example/eA"), base64_part("https://a.example/eA==")),
    ],
    ids=str,
)
def test_everything_else_of_a_file_counts(one: Any, other: Any) -> None:
    """Another type, detail, format, name or address of a file gives another key."""
    assert key(one) != key(other)


@pytest.mark.parametrize("media_type", ["text/plain;charset=UTF-8", "TEXT/plain;charset=utf8", "text/plain"])
def test_utf_8_is_what_text_is(media_type: str) -> None:
    """A file of text gives the same key with and without its charset UTF-8."""
    assert key(base64_part(data_url(b"x", media_type))) == key(base64_part(data_url(b"x", "text/plain")))


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_files_count_by_content_in_every_role(role: str) -> None:
    """A file in a message of any role counts by its bytes, beside other parts too."""
    text = {"type": "text", "text": "look"}
    one, other = url_part(data_url(b"\xfb")), url_part("data:image/png;base64,-w")
    assert key(text, one, role=role) == key(text, other, role=role)


def test_files_count_by_content_in_messages_only() -> None:
    """A data URL outside of the content parts of a message counts as text."""
    one, other = url_part(data_url(b"\xfb")), url_part("data:image/png;base64,-w")
    assert key(one) == key(other)
    assert key(extra=[one]) != key(extra=[other])
    assert key({"type": "tool_result", "content": [one]}) != key({"type": "tool_result", "content": [other]})
    assert key({"type": "text", "text": data_url(b"\xfb")}) != key({"type": "text", "text": other["image_url"]["url"]})
    for field in ("input", "prompt", "tools"):
        bodies = [{"model": "m", field: [part]} for part in (one, other)]
        assert request_key("public", "c", bodies[0]) != request_key("public", "c", bodies[1])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["data:,x", "eA==", "data:"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["url", "data", "a"]), inner, max_size=2)
    ),
    max_leaves=5,
)
odd_parts = values | st.dictionaries(
    st.sampled_from(["type", "text", *URL_PARTS, *BASE64_PARTS]), values | st.sampled_from(["text", "image_url"])
)


@given(st.lists(odd_parts, max_size=3))
@quick
def test_parts_of_any_shape_have_a_key(parts: list[Any]) -> None:
    """Content of any shape gives a key, and making it leaves the request as it was."""
    before = copy.deepcopy(parts)
    assert key(*parts) != key(*parts, "another")
    assert repr(parts) == repr(before)


@given(contents)
@quick
def test_no_text_has_the_key_of_a_file(content: bytes) -> None:
    """No JSON value in place of a file gives the key that its digest gives."""
    of_file = key({"type": "image_url", "image_url": data_url(content)})
    plain = standard(content)
    forged: list[Any] = [plain, plain.rstrip("="), content.hex(), content.decode("latin-1"), list(content)]
    forged += [{"url": data_url(content)}, {"data": plain}, ["image/png", plain], [3, plain], f" {data_url(content)}"]
    assert of_file not in {key({"type": "image_url", "image_url": value}) for value in forged}


def test_a_lone_surrogate_is_no_data_url() -> None:
    """A data URL with a lone surrogate fails as any text with one does."""
    for text in ("data:\ud800,x", "data:,\ud800", "data:;base64,\ud800", "\ud800"):
        with pytest.raises(UnicodeEncodeError):
            key(url_part(text))


@pytest.mark.parametrize("size", [2**16 * 3 // 4 + offset for offset in (-2, -1, 0, 1, 2)])
def test_files_longer_than_a_chunk_count_by_content(size: int) -> None:
    """The encoding of a file of some 48 KiB does not count, and its last byte does."""
    content = os.urandom(size - 1)
    one, other = content + b"\0", content + b"\1"
    plain = key(url_part(data_url(one)))
    assert {key(url_part(spell(one))) for spell in URL_SPELLINGS} == {plain}
    assert key(url_part(data_url(other))) != plain


def test_padding_in_the_middle_is_not_base64() -> None:
    """Padding at the end of a chunk, before the end of the text, makes a URL count as text."""
    first = os.urandom(2**16 * 3 // 4 - 1)
    assert len(standard(first)) == 2**16
    assert standard(first).endswith("=")
    url = "data:image/png;base64," + standard(first) + standard(b"abc")
    assert key(url_part(url)) != key(url_part(data_url(first + b"abc")))
    assert key(url_part(url)) != key(url_part(url + "\n"))


def test_a_large_image_is_not_copied() -> None:
    """The key of a request with an image of 12 MB takes less than a megabyte of memory."""
    part = url_part(data_url(os.urandom(12_000_000)))
    tracemalloc.start()
    try:
        key(part)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "url",
    [
        "data:;base64," + "=" * 2**22,
        "data:;base64," + "\n" * 2**22,
        "data:;base64," + "%41" * 2**20,
        "data:," + "%" * 2**22,
        "data:," + "%41" * 2**20,
        "data:" + ";" * 2**22 + ",",
        "data:" + ";base64" * 2**19,
    ],
    ids=lambda url: url[:16],
)
def test_a_hostile_url_takes_little_memory(url: str) -> None:
    """A URL made of padding, escapes or parameters takes memory in proportion to its length."""
    tracemalloc.start()
    try:
        key(url_part(url))
        assert tracemalloc.get_traced_memory()[1] < 12 * len(url)
    finally:
        tracemalloc.stop()
