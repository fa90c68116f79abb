"""URLs that an upstream would fetch: where they lead inward they are refused, in every form of API."""

import contextlib
import ipaddress
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.http.fetched_urls import Policy, check_urls
from gateway.http.json_object import relayed_fields

PUBLIC = [
    "https://example.org/a.png",
    "HTTPS://Example.ORG:8443/a.png?b=c#d",
    "http://93.184.216.34/a.png",
    "http://[2606:2800:220:1::1]/a.png",
    "https://example.org/ä b".replace(" ", "%20"),
    "https://xn--bcher-kva.example.com/",
    "https://1.example.org/",
    "data:image/png;base64,iVBORw0KGgo=",
    "DATA:image/png;base64,iVBORw0KGgo=",
]
INWARD = [
    "http://localhost/",
    "http://LOCALHOST:8080/",
    "http://localhost./",
    "http://a.localhost/",
    "http://printer.local/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://redis:6379/",
    "http://vault.corp/",
    "http://127.0.0.1.nip.io/",
    "http://localtest.me/",
    "http://127.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.1/",
    "http://0177.0.0.1/",
    "http://017700000001/",
    "http://010.0.0.1/",
    "http://127.0.0.1./",
    "http://0/",
    "http://0x/",
    "http://256.256.256.256/",
    "http://1.2.3.4.5/",
    "http://09.0.0.1/",
    "http://10.1.2.3/",
    "http://172.31.255.255/",
    "http://192.168.0.1/",
    "http://100.64.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://168.63.129.16/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://[::1]/",
    "http://[::]/",
    "http://[0:0:0:0:0:0:0:1]:80/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[::127.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[fe80::1]/",
    "http://[fc00::1]/",
    "http://[ff02::1]/",
    "http://[2001:db8::1]/",
    "http://[fe80::1%25eth0]/",
    "http://[fe80::1%eth0]/",
]
UNCLEAR = [
    "file:///etc/passwd",
    "ftp://example.org/a.png",
    "gopher://example.org/",
    "javascript:alert(1)",
    "/etc/passwd",
    "//127.0.0.1/",
    "http:/127.0.0.1/",
    "http:127.0.0.1/",
    "http:\\\\127.0.0.1/",
    "http:///a.png",
    "http://example.org\\@127.0.0.1/",
    "http://example.org@127.0.0.1/",
    "http://user:password@example.org/",
    "http://127.0.0.1#@example.org/",
    " http://127.0.0.1/",
    "ht\ttp://127.0.0.1/",
    "http://127.0.0.1\n.example.org/",
    "http://127%2e0%2e0%2e1/",
    "http://127。0。0。1/",
    "http://①②⑦.⓪.⓪.①/",
    "http://example.org:80:80/",
    "http://example.org/a b",
    "http://example.org/a\tb",
    "http://example.org/\\..\\a",
    "http://[::1/",
    "d\u0430ta:image/png;base64,AAAA",  # a Cyrillic letter
]


def image(url: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def refused(fields: dict[str, Any], policy: Policy = "public") -> str:
    """The field that is refused."""
    with pytest.raises(InvalidRequest) as caught:
        check_urls(fields, policy)
    assert caught.value.code == "url_not_allowed"
    assert caught.value.param is not None
    assert f"'{caught.value.param}'" in caught.value.message
    return caught.value.param


@pytest.mark.parametrize("url", PUBLIC)
def test_a_public_url_passes(url: str) -> None:
    """As do data: URLs."""
    check_urls(image(url), "public")


@pytest.mark.parametrize("url", [*INWARD, *UNCLEAR])
def test_a_url_that_leads_inward_is_refused(url: str) -> None:
    """However its host is spelt, and whatever libraries read differently."""
    assert refused(image(url)) == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize("url", [*PUBLIC[:-2], *INWARD, *UNCLEAR])
def test_with_none_only_data_passes(url: str) -> None:
    """The policy `none` allows data: URLs alone, and `any` allows all."""
    check_urls(image(url), "any")
    check_urls(image("data:,a"), "none")
    refused(image(url), "none")


def test_a_password_in_a_url_is_named_and_not_shown() -> None:
    """It is the reason for the refusal."""
    with pytest.raises(InvalidRequest, match="without a user name and a password") as caught:
        check_urls(image("http://user:secret@example.org/"), "public")
    assert "secret" not in caught.value.message


BAD = "http://127.0.0.1/"
PLACES: dict[str, dict[str, Any]] = {
    "messages[0].content[0].image_url": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": BAD}]}]
    },
    "messages[1].content[1].video_url.url": {
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"video_url": {"url": BAD}}]},
        ]
    },
    "messages[0].content[0].audio_url.url": {
        "messages": [{"content": [{"type": "audio_url", "audio_url": {"url": BAD}}]}]
    },
    "messages[0].content[0].file.file_url": {"messages": [{"content": [{"type": "file", "file": {"file_url": BAD}}]}]},
    "messages[0].content[0].image": {"messages": [{"content": [{"type": "image", "image": BAD}]}]},
    "messages[0].content[0].video[1].video": {"messages": [{"content": [{"type": "video", "video": ["data:,", BAD]}]}]},
    "messages[0].content[0].source.url": {
        "messages": [{"content": [{"type": "image", "source": {"type": "url", "url": BAD}}]}]
    },
    "messages[0].content[0].content[0].source.url": {
        "messages": [
            {
                "content": [
                    {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": BAD}}]}
                ]
            }
        ]
    },
    "messages[0].content[0].source.content[0].source.url": {
        "messages": [
            {
                "content": [
                    {
                        "type": "document",
                        "source": {"type": "content", "content": [{"type": "image", "source": {"url": BAD}}]},
                    }
                ]
            }
        ]
    },
    "input[0].content[0].image_url": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": BAD}]}]
    },
    "input[0].content[0].file_url": {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": BAD}]}]},
    "input[0].output[0].image_url": {
        "input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": BAD}]}]
    },
    "input[0].output.image_url": {
        "input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": BAD}}]
    },
    "prompt.variables.photo.image_url": {
        "prompt": {"id": "p", "variables": {"photo": {"type": "input_image", "image_url": BAD}}}
    },
    "tools[1].server_url": {"tools": [{"type": "function"}, {"type": "mcp", "server_label": "a", "server_url": BAD}]},
    "tools[0].input_image_mask.image_url": {
        "tools": [{"type": "image_generation", "input_image_mask": {"image_url": BAD}}]
    },
    "mcp_servers[0].url": {"mcp_servers": [{"type": "url", "name": "a", "url": BAD}]},
    "documents[0].content[0].image_url.url": {"documents": [{"content": [{"image_url": {"url": BAD}}]}]},
    "images[0].image_url": {"images": [{"image_url": BAD}]},
    "file_url": {"file_url": BAD},
    "image": {"image": BAD},
}


@pytest.mark.parametrize(("field", "fields"), PLACES.items(), ids=PLACES.keys())
def test_a_url_is_found_in_every_form_of_api(field: str, fields: dict[str, Any]) -> None:
    """And the error names its field."""
    assert refused({"model": "m", **fields}) == field
    with pytest.raises(InvalidRequest):
        check_urls(relayed_fields(msgspec.json.encode({"model": "m", **fields})), "public")


NOT_FETCHED: dict[str, dict[str, Any]] = {
    "a prompt": {"messages": [{"role": "user", "content": f"What is at {BAD}?"}]},
    "a part of text": {
        "messages": [{"content": [{"type": "text", "text": BAD, "cache_control": {"type": "ephemeral"}}]}]
    },
    "arguments of a call": {"messages": [{"content": None, "tool_calls": [{"function": {"arguments": BAD}}]}]},
    "input of a tool": {
        "messages": [{"content": [{"type": "tool_use", "id": "a", "name": "b", "input": {"url": BAD}}]}]
    },
    "a schema": {
        "tools": [{"type": "function", "function": {"parameters": {"properties": {"url": {"default": BAD}}}}}]
    },
    "a schema of Anthropic's": {"tools": [{"name": "a", "input_schema": {"properties": {"url": {"const": BAD}}}}]},
    "a citation": {
        "input": [
            {"content": [{"type": "output_text", "text": "a", "annotations": [{"type": "url_citation", "url": BAD}]}]}
        ]
    },
    "a search": {"input": [{"type": "web_search_call", "action": {"type": "open_page", "url": BAD}}]},
    "a result of a search": {
        "messages": [
            {"content": [{"type": "web_search_tool_result", "content": [{"type": "web_search_result", "url": BAD}]}]}
        ]
    },
    "images of Ollama": {"messages": [{"role": "user", "content": "a", "images": ["iVBORw0KGgo="]}]},
    "base64": {"messages": [{"content": [{"type": "image", "source": {"type": "base64", "data": "/9j/4AAQ"}}]}]},
    "audio": {"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}]},
    "metadata": {"metadata": {"url": BAD}},
    "texts to embed": {"input": [BAD, BAD]},
}


@pytest.mark.parametrize("fields", NOT_FETCHED.values(), ids=NOT_FETCHED.keys())
def test_text_and_what_a_model_said_is_not_refused(fields: dict[str, Any]) -> None:
    """URLs there are fetched by nobody."""
    check_urls({"model": "m", **fields}, "public")
    check_urls({"model": "m", **fields}, "none")


@given(address=st.ip_addresses())
def test_no_address_that_is_not_global_passes(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """As the registries of special addresses in the standard library have it, which may know fewer."""
    host = f"[{address}]" if address.version == 6 else str(address)
    if not address.is_global or address.is_multicast:
        refused(image(f"http://{host}/"))


@given(address=st.ip_addresses(v=4, network="10.0.0.0/8") | st.ip_addresses(v=4, network="127.0.0.0/8"), data=st.data())
def test_no_spelling_of_a_private_address_passes(address: ipaddress.IPv4Address, data: st.DataObject) -> None:
    """Decimal, octal, hexadecimal, shortened, mapped into IPv6."""
    a, b, c, d = address.packed
    value = int(address)
    spelling = data.draw(
        st.sampled_from(
            [
                *(f"{value}", f"{value:#x}", f"0{value:o}", f"{a}.{b}.{c}.{d}", f"{a}.{b}.{c << 8 | d}"),
                *(f"{a:#x}.{b:#x}.{c:#x}.{d:#x}", f"0{a:o}.{b}.{c}.{d}", f"{a}.{b << 16 | c << 8 | d}"),
                *(
                    f"[::ffff:{address}]",
                    f"[::{address}]",
                    f"[64:ff9b::{address}]",
                    f"[2002:{a:02x}{b:02x}:{c:02x}{d:02x}::]",
                ),
            ]
        )
    )
    refused(image(f"http://{spelling}/"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.just(BAD),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "content", "url", "image_url", "input", "text", "a"]), inner, max_size=4
        )
    ),
)


@given(fields=st.dictionaries(st.sampled_from(["messages", "input", "tools", "mcp_servers", "url"]), VALUES))
def test_any_body_is_checked_or_refused(fields: dict[str, Any]) -> None:
    """No value of a field is a fault of the gateway."""
    with contextlib.suppress(InvalidRequest):
        check_urls(fields, "public")


def test_a_deep_body_is_refused() -> None:
    """Before the stack ends."""
    inner: Any = {"image_url": BAD}
    for _ in range(500):
        inner = {"content": [inner]}
    with pytest.raises(InvalidRequest):
        check_urls({"messages": [inner]}, "public")


@pytest.mark.parametrize("body", [b"", b"[1]", b'"a"', b"{", b"\xff", b'{"messages":"a","tools":{}}', b"--boundary"])
def test_a_body_that_is_no_object_is_left_to_the_upstream(body: bytes) -> None:
    """It names no URL that anybody could read."""
    check_urls(relayed_fields(body), "public")


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":NaN,"image_url":"%s"}',
        b'{"x":"\\ud800","image_url":"%s"}',
        b'\xef\xbb\xbf{"image_url":"%s"}',
        b'{"x":%s,"image_url":"%%s"}' % (b"[" * 2_000 + b"]" * 2_000),
    ],
)
def test_a_body_is_read_as_leniently_as_by_an_engine(body: bytes) -> None:
    """What Python's json reads is no JSON for others: the URL in it is fetched all the same."""
    with pytest.raises(InvalidRequest):
        check_urls(relayed_fields(body % BAD.encode()), "public")


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_a_body_is_read_in_every_coding_of_json(coding: str) -> None:
    """Python's json finds out which of them it is."""
    with pytest.raises(InvalidRequest):
        check_urls(relayed_fields(f'{{"image_url":"{BAD}"}}'.encode(coding)), "public")


def test_a_long_prompt_costs_microseconds() -> None:
    """26 KB in 50 messages without a URL: a generous bound for a busy machine."""
    fields = {"model": "m", "messages": [{"role": "user", "content": "x" * 520} for _ in range(50)]}
    best = min(_seconds(fields) for _ in range(200))
    assert best < 100e-6


def _seconds(fields: dict[str, Any]) -> float:
    began = time.perf_counter()
    check_urls(fields, "public")
    return time.perf_counter() - began
