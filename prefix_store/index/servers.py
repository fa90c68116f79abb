"""The servers that a URL names: one, sentinels that know the master, or nodes of a cluster."""

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode

Address = tuple[str, int]

_SEVERAL = re.compile(
    r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://((?P<user>.*)@)?(?P<hosts>[^/?@]+)(/(?P<path>[^?]*))?"
    r"(\?(?P<query>.*))?"
)
_ADDRESS = re.compile(r"(\[(?P<v6>[^\]]+)\]|(?P<host>[^\s:\[\]]+))(:(?P<port>\d{1,5}))?")
_PORTS = {"sentinel": 26379, "cluster": 6379}
# Options that are not for the connection to a server.
_OWN_OPTIONS = ("read_from", "sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Servers:
    """`url` is that of a single server, with credentials and options; `master` is the name that the sentinels know."""

    url: str
    sentinels: tuple[Address, ...] = ()
    nodes: tuple[Address, ...] = ()
    master: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = None


def servers_of(url: str) -> Servers:
    """The servers of redis+sentinel://HOST,HOST/MASTER/DB or redis+cluster://HOST,HOST; of others the URL itself.

    Raises ValueError.
    """
    match = _SEVERAL.fullmatch(url)
    if match is None:
        return Servers(url)
    addresses = tuple(_address(text, _PORTS[match["kind"]]) for text in match["hosts"].split(","))
    options = dict(parse_qsl(match["query"] or ""))
    own = {name: options.pop(name, None) for name in _OWN_OPTIONS}
    user = f"{match['user']}@" if match["user"] else ""
    query = f"?{urlencode(options)}" if options else ""
    host, port = addresses[0]
    place = f"{match['scheme']}://{user}{f'[{host}]' if ':' in host else host}:{port}"
    if match["kind"] == "cluster":
        return Servers(f"{place}/{query}", nodes=addresses)
    master, _, database = (match["path"] or "").partition("/")
    if not master:
        raise ValueError("expected the name of the master: redis+sentinel://HOST:PORT/NAME/DB")
    return Servers(
        f"{place}/{database}{query}",
        addresses,
        master=unquote(master),
        sentinel_username=own["sentinel_username"],
        sentinel_password=own["sentinel_password"],
    )


def _address(text: str, port: int) -> Address:
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return unquote(match["v6"] or match["host"]), int(match["port"] or port)
