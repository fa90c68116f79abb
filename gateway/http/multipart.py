"""The parts of a multipart/form-data body (RFC 7578), for what the gateway must know of it and for its key.

The body itself is sent on as it is. Two bodies have equal parts exactly if they differ in nothing but the boundary, the
order of the headers of a part, and white space and quotes around the values of headers. Whatever readers of forms take
differently, such as text before the first part, is refused: no two of them see different forms under one key.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from gateway.errors import InvalidRequest

MAX_PARTS = 1_000
MAX_HEADER_BYTES = 8_192
"""Of one part."""

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")  # RFC 2046, section 5.1.1
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105  # RFC 9110's word for a name
_VALUE = re.compile(rf"[ \t]*({_TOKEN}(?:/{_TOKEN})?)[ \t]*")
_PARAMETER = re.compile(rf';[ \t]*({_TOKEN}\*?)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"\\]+))[ \t]*')
_HEADER = re.compile(rf"({_TOKEN}):([^\r\n\0]*)")


class Part(NamedTuple):
    """One part of a form. `content` is a view of the body, not a copy.

    `name` and `filename` are as they stand between their quotes; bytes in them that are not UTF-8 are lone surrogates
    (PEP 383). `filename` is None and `content_type` is "" where the part says none. `others` are its other headers and
    the other parameters of its Content-Disposition, sorted. `name` is None where `name*` among them replaces it.
    """

    name: str | None
    filename: str | None
    content_type: str
    others: tuple[tuple[str, str], ...]
    content: memoryview

    @property
    def text(self) -> str:
        """The content of a plain field. Raises InvalidRequest if it is not UTF-8."""
        try:
            return str(self.content, "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"The field {self.name!r} must be text in UTF-8.") from error

    @property
    def digest(self) -> bytes:
        """BLAKE2b-256 of the content."""
        return hashlib.blake2b(self.content, digest_size=32).digest()


def multipart_fields(content_type: str, body: bytes) -> list[Part]:
    """The parts of `body` in their order, in time linear in its length. `content_type` is the request's header.

    Raises InvalidRequest for a body that is not what the header says, and for one with more than MAX_PARTS parts or
    with more than MAX_HEADER_BYTES of headers in a part.
    """
    delimiter = b"\r\n--" + _boundary(content_type)
    if not body.startswith(delimiter[2:]):
        raise _invalid("it must start with '--' and the boundary")
    view = memoryview(body)
    parts: list[Part] = []
    at = len(delimiter) - 2
    while not body.startswith(b"--", at):
        number = len(parts) + 1
        if number > MAX_PARTS:
            raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.", code="too_many_values")
        if not body.startswith(b"\r\n", at):
            raise _invalid(f"a line break must follow the boundary before part {number}")
        # From the line break on, which is all there is before the blank line of a part without headers.
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEADER_BYTES + 6)
        if head_end < 0:
            raise _invalid(f"the headers of part {number} must end with a blank line within {MAX_HEADER_BYTES} bytes")
        start = head_end + 4
        end = body.find(delimiter, start)
        if end < 0:
            raise _invalid(f"part {number} must end with a line break and the boundary")
        parts.append(_part(number, body[at + 2 : head_end], view[start:end]))
        at = end + len(delimiter)
    if body[at + 2 :] not in (b"", b"\r\n"):
        raise _invalid("nothing must follow the last boundary")
    return parts


def text_of(parts: Sequence[Part], name: str) -> str | None:
    """The text of the field `name`; None if there is none. Raises InvalidRequest if it is there twice, or not text."""
    found = [part for part in parts if part.name == name]
    if len(found) > 1:
        raise InvalidRequest(f"The field {name!r} is there twice.", param=name, code="repeated_key")
    return found[0].text if found else None


def _boundary(content_type: str) -> bytes:
    media_type, parameters = _value_and_parameters(content_type) or ("", {})
    if media_type != "multipart/form-data":
        raise InvalidRequest("The Content-Type must be multipart/form-data with a boundary.")
    if parameters.get("charset", "utf-8").lower() not in ("utf-8", "utf8", "us-ascii"):
        raise InvalidRequest("The charset of a multipart/form-data body must be UTF-8.")
    boundary = parameters.get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidRequest("The Content-Type must have a boundary of 1 to 70 characters (RFC 2046).")
    return boundary.encode("ascii")


def _part(number: int, head: bytes, content: memoryview) -> Part:
    headers = _headers(number, head)
    kind, parameters = _value_and_parameters(headers.pop("content-disposition", "")) or ("", {})
    name = parameters.pop("name", None)
    if kind != "form-data" or (name is None and "name*" not in parameters):
        raise _invalid(f"part {number} must have the header 'Content-Disposition: form-data; name=\"...\"'")
    filename = parameters.pop("filename", None)
    content_type = headers.pop("content-type", "")
    others = [*headers.items(), *((f"content-disposition; {key}", value) for key, value in parameters.items())]
    return Part(name, filename, content_type, tuple(sorted(others)), content)


def _headers(number: int, head: bytes) -> dict[str, str]:
    """The headers of a part, by their names in lower case."""
    headers: dict[str, str] = {}
    for line in head.decode("utf-8", "surrogateescape").split("\r\n"):
        match = _HEADER.fullmatch(line)
        if match is None or match[1].lower() in headers:
            raise _invalid(f"each header of part {number} must be one line, and there once")
        headers[match[1].lower()] = match[2].strip(" \t")
    return headers


def _value_and_parameters(header: str) -> tuple[str, dict[str, str]] | None:
    """The value and the parameters of a header such as `form-data; name="a"`; None if it has no such form.

    Both names are in lower case. Backslashes stay in quoted values: readers differ in what they mean.
    """
    value = _VALUE.match(header)
    if value is None:
        return None
    parameters: dict[str, str] = {}
    at = value.end()
    while at < len(header):
        parameter = _PARAMETER.match(header, at)
        if parameter is None or parameter[1].lower() in parameters:
            return None
        parameters[parameter[1].lower()] = parameter[2] if parameter[2] is not None else parameter[3]
        at = parameter.end()
    return value[1].lower(), parameters


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The body is not the multipart/form-data that its Content-Type says: {reason}.")
