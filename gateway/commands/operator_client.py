"""The admin API of a running gateway, for commands: JSON over HTTP with the admin key."""

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, BinaryIO, NoReturn

from gateway.settings.fields import InvalidValue
from gateway.settings.refusals import URL_VARIABLE
from gateway.settings.secret_files import read_secret

DEFAULT_URL = "http://127.0.0.1:8080"
_ADMIN_KEY_FILE = "KEEPGATE_ADMIN_KEY_FILE"
_DEADLINE = 30.0
_MAX_SHOWN = 200


class OperatorError(Exception):
    """Why a command failed, in one line."""


class OperatorClient:
    """Sends requests to the gateway at `url`, such as http://127.0.0.1:8080, with the admin key or as the client whose
    key `bearer` is; "" sends none.
    """

    def __init__(self, url: str, admin_key: str = "", bearer: str = "") -> None:
        # A base URL as clients have it is accepted as well.
        self._url = url.rstrip("/").removesuffix("/v1")
        self._admin_key = admin_key
        self._headers = {"x-keepgate-admin-key": admin_key} if admin_key else {}
        if bearer:
            self._headers["Authorization"] = f"Bearer {bearer}"

    def request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The decoded answer to a request such as GET /v1/keys. Raises OperatorError."""
        if body is None:
            return self._send(method, path, params, None, {})
        return self._send(method, path, params, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def send_lines(self, path: str, params: Mapping[str, str], lines: BinaryIO) -> dict[str, Any]:
        """The decoded answer to a POST of JSON Lines, a file that is sent as it is read. Raises OperatorError."""
        headers = {"Content-Type": "application/jsonl", "Content-Length": str(os.fstat(lines.fileno()).st_size)}
        return self._send("POST", path, params, lines, headers)

    def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        data: bytes | BinaryIO | None,
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        query = f"?{urllib.parse.urlencode(params)}" if params else ""
        headers = {**self._headers, **headers}
        try:
            if urllib.parse.urlsplit(self._url).scheme not in ("http", "https"):
                raise ValueError
            request = urllib.request.Request(self._url + path + query, data, headers, method=method)  # noqa: S310  # checked above
        except ValueError as error:
            raise OperatorError(f"{self._url!r} is not the URL of a gateway, such as {DEFAULT_URL}") from error
        return self._sent(request)

    def _sent(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            # Not by a proxy of the environment, which would see the admin key.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=_DEADLINE) as answer:
                decoded = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise OperatorError(self._refusal(error)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise OperatorError(f"no gateway answers at {self._url}: {reason}") from error
        except ValueError as error:
            raise OperatorError(f"what answers at {self._url} is not Keepgate: its answer is no JSON") from error
        if not isinstance(decoded, dict):
            raise OperatorError(f"what answers at {self._url} is not Keepgate: its answer is no JSON object")
        return decoded

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        """What the gateway says, else the status; of the admin key, where a command takes it from."""
        try:
            fields = json.loads(error.read())["error"]
            message, code = fields["message"], fields.get("code")
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
            return f"the gateway answered with status {error.code}"
        if code == "admin_key_required" and error.code == HTTPStatus.UNAUTHORIZED:
            which = "another" if self._admin_key else "its"
            return f"the gateway needs {which} admin key: --admin-key or KEEPGATE_ADMIN_KEY"
        return " ".join(str(message).split())[:_MAX_SHOWN]


def key_names(client: OperatorClient) -> dict[str, str]:
    """The names of virtual keys by their ids; none from a gateway that has no keys, or cannot say them."""
    try:
        return {key["id"]: key["name"] for key in client.request("GET", "/v1/keys")["data"]}
    except OperatorError:  # it needs Redis, and what is shown can do without
        return {}


class CommandParser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where the options are listed."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def add_operator_options(parser: argparse.ArgumentParser) -> None:
    """The options --url, --admin-key and --json."""
    parser.add_argument(
        "--url",
        default=os.environ.get(URL_VARIABLE) or DEFAULT_URL,
        help=f"the gateway ({URL_VARIABLE}, else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--admin-key",
        metavar="KEY",
        default=os.environ.get("KEEPGATE_ADMIN_KEY", ""),
        help="its admin key (KEEPGATE_ADMIN_KEY, or a file: KEEPGATE_ADMIN_KEY_FILE); a gateway on the loopback without"
        " one needs none",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def operator_client(parsed: argparse.Namespace, bearer: str = "") -> OperatorClient:
    """The client that the options ask for, for the app whose key `bearer` is. Raises OperatorError for an admin
    key in a file that cannot be read.
    """
    key, file = parsed.admin_key, os.environ.get(_ADMIN_KEY_FILE)
    if not key and file is not None:
        try:
            key = read_secret(file)
        except InvalidValue as error:
            raise OperatorError(f"{_ADMIN_KEY_FILE}: {error}") from error
    return OperatorClient(parsed.url, key, bearer)
