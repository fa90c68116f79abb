"""The types of settings: each checks its value, and its description is what an error message says was expected."""

import re
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from cache.stores.redis_url import InvalidRedisUrl, parse_redis_url

TEN_YEARS = 315_360_000.0

Text = Annotated[str, Meta(min_length=1, description="text that is not empty")]
Flag = Annotated[bool, Meta(description="true or false")]
Port = Annotated[int, Meta(ge=0, le=65_535, description="a port from 1 to 65535, or 0 for any free one")]
Seconds = Annotated[float, Meta(ge=0, le=TEN_YEARS, description="seconds, from 0 to ten years")]
PositiveSeconds = Annotated[float, Meta(gt=0, le=TEN_YEARS, description="seconds, more than 0 and at most ten years")]


class SettingsError(Exception):
    """An invalid setting; the message names its source, its key, and what would be right."""


class SettingsConflict(SettingsError):
    """A setting that does not go with others, or with the machine. `message` goes on from the name of the setting."""

    def __init__(self, path: tuple[str, ...], message: str) -> None:
        super().__init__(dotted(path) + message)
        self.path = path
        self.message = message


def dotted(path: tuple[str, ...]) -> str:
    """A setting as a file names it, such as `upstreams[0].url`."""
    return "".join(f"[{name}]" if name.isdecimal() else f".{name}" for name in path).removeprefix(".")


class InvalidValue(ValueError):
    """Why a value is invalid; raised by the checks of a type."""


class Size(int):
    """A number of bytes, written as 1048576 or "1MiB"."""

    _UNITS: ClassVar = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    _MAX: ClassVar = 2**50

    @classmethod
    def parse(cls, value: Any) -> "Size":
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        unit = cls._UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None or float(match[1]) * unit > cls._MAX:
            raise ValueError
        return cls(float(match[1]) * unit)


def size_text(size: int) -> str:
    """A number of bytes as a setting has it, such as 32MiB; one that is no whole number of units in bytes."""
    for unit, of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= of and size % of == 0:
            return f"{size // of}{unit}"
    return f"{size} bytes"


class PositiveSize(Size):
    """A size of at least 1 KiB."""

    @classmethod
    def parse(cls, value: Any) -> "PositiveSize":
        size = super().parse(value)
        if size < 2**10:
            raise ValueError
        return cls(size)


class Secret(str):
    """Text that never shows in a log or a traceback."""

    @classmethod
    def parse(cls, value: Any) -> "Secret":
        # A block of YAML ends with a line break; no header can have one.
        if not isinstance(value, str) or not (text := value.strip()) or not text.isprintable():
            raise ValueError
        return cls(text)

    def __repr__(self) -> str:
        return "'***'"


def check_upstream(url: str) -> None:
    """The base URL of an OpenAI-compatible server, or `mock:`, or `mock:FILE.yaml`. Raises ValueError for others."""
    if url.startswith("mock:"):
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or re.search(r"\s", url):
        raise ValueError
    if parts.username is not None:
        raise InvalidValue("expected a URL without credentials: each caller's own Authorization is what is sent on")
    if parts.query or parts.fragment:
        raise InvalidValue("expected a base URL, without anything from `?` or `#` on")


def check_model_server(url: str) -> None:
    """The base URL of an OpenAI-compatible server. Raises ValueError for others."""
    if url.startswith("mock:"):
        raise ValueError
    if urlsplit(url).username is not None:
        raise InvalidValue("expected a URL without credentials: the key is a setting of its own")
    check_upstream(url)


def check_store(url: str) -> None:
    """`embedded`, `none`, or a Redis URL (cache/stores/redis_url.py). Raises ValueError for others."""
    if url in ("embedded", "none"):
        return
    try:
        parse_redis_url(url)
    except InvalidRedisUrl as error:
        raise InvalidValue(str(error)) from error


def masked(url: str) -> str:
    """The URL, or whatever stands where one should, without what may be a password."""
    without_options = re.sub(r"(password=)[^&\s]*", r"\1***", url)
    return re.sub(r"^([\w+]+:/*)?.*@", r"\1***@", without_options)


Count = Annotated[
    Annotated[int, Meta(ge=1, lt=2**31)] | None, Meta(description="a whole number, 1 or more and below 2147483648")
]
File = Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="the path of a file")]
CredentialField = Annotated[
    Annotated[str, Meta(pattern=r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:.+)$")] | None,
    Meta(description="env:NAME or file:PATH, where the secret is"),
]
Codec = Annotated[Literal["plain", "int8", "fp8"] | None, Meta(description="one of plain, int8 and fp8")]
SizeField = Annotated[Size, Meta(description="a size such as 256MiB")]
PositiveSizeField = Annotated[PositiveSize, Meta(description="a size such as 256MiB, at least 1KiB")]
