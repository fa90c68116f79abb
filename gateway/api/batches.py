"""OpenAI's Files and Batch API."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.api.app_keys import SETTINGS
from gateway.batches.batch import Batch, kept_headers, parse_lifetime, parse_new_batch
from gateway.batches.files import MONTH, PURPOSES, FileDraft, FileObject, reporting_full_disk
from gateway.batches.folders import Page
from gateway.batches.store import BatchStore
from gateway.batches.threads import in_thread
from gateway.errors import BodyTooLarge, InvalidRequest, RequestTimeout
from gateway.http.body import read_body
from gateway.http.cache_control import tags_of
from gateway.http.response_writer import ResponseWriter
from gateway.settings.fields import size_text
from gateway.tenants.caller import CALLER

BATCHES = web.AppKey("batches", BatchStore)

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_TEXT_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_CHUNK = 2**18
_WRITTEN_AT_ONCE = 2**20
_MAX_TEXT = 2**10
_MAX_FILENAME = 255
_MAX_AROUND_FILE = 2**16
_MAX_NEW_BATCH = 2**18
_BATCHES_OF_A_PAGE = (20, 100)
_FILES_OF_A_PAGE = (10_000, 10_000)


async def create_file(request: web.Request) -> web.Response:
    """POST /v1/files."""
    store = request.app[BATCHES]
    with reporting_full_disk():
        async with draft_in(store) as draft:
            form = await _read_form(request, draft, store.files.max_bytes)
            filename, purpose, lifetime = form.checked()
            record = await in_thread(draft.commit, _namespace(request), filename, purpose, lifetime)
    return _json(record)


async def list_files(request: web.Request) -> web.Response:
    """GET /v1/files."""
    query = _query(request, ("limit", "after", "order", "purpose"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be asc or desc.", param="order")
    limit, after = _limit(query, *_FILES_OF_A_PAGE), query.get("after")
    files = request.app[BATCHES].files
    return _list(
        await asyncio.to_thread(files.page, _namespace(request), limit, after, query.get("purpose"), order == "desc")
    )


async def get_file(request: web.Request) -> web.Response:
    """GET /v1/files/{id}."""
    return _json(await asyncio.to_thread(request.app[BATCHES].files.get, _namespace(request), request.match_info["id"]))


async def delete_file(request: web.Request) -> web.Response:
    """DELETE /v1/files/{id}."""
    file_id = request.match_info["id"]
    await in_thread(request.app[BATCHES].files.delete, _namespace(request), file_id)
    return _json({"id": file_id, "object": "file", "deleted": True})


async def get_content(request: web.Request) -> web.StreamResponse:
    """GET /v1/files/{id}/content."""
    files = request.app[BATCHES].files
    record, content = await in_thread(files.open, _namespace(request), request.match_info["id"])
    with contextlib.closing(content):
        response = web.StreamResponse(
            headers={
                "Content-Type": "application/octet-stream",
                "Content-Disposition": f'attachment; filename="{record.id}"',
                "X-Content-Type-Options": "nosniff",
            }
        )
        response.content_length = record.size
        await response.prepare(request)
        writer = ResponseWriter(request, response, request.app[SETTINGS].timeouts.client)
        while request.method != "HEAD" and (chunk := await in_thread(content.read, _CHUNK)):
            await writer.send(chunk)
        await writer.finish()
        return response


async def create_batch(request: web.Request) -> web.Response:
    """POST /v1/batches."""
    settings = request.app[SETTINGS]
    store = request.app[BATCHES]
    new = parse_new_batch(await read_body(request, _MAX_NEW_BATCH, settings.timeouts.client))
    tags_of(request.headers)  # else each line of the batch would fail
    headers = kept_headers(request.headers, settings.cache.namespace, settings.cache.key_headers)
    with reporting_full_disk():
        batch = await in_thread(store.create, _namespace(request), new, headers)
    store.created.set()
    return _json(batch)


async def list_batches(request: web.Request) -> web.Response:
    """GET /v1/batches."""
    query = _query(request, ("limit", "after"))
    limit = _limit(query, *_BATCHES_OF_A_PAGE)
    return _list(await asyncio.to_thread(request.app[BATCHES].page, _namespace(request), limit, query.get("after")))


async def get_batch(request: web.Request) -> web.Response:
    """GET /v1/batches/{id}."""
    return _json(await asyncio.to_thread(request.app[BATCHES].get, _namespace(request), request.match_info["id"]))


async def cancel_batch(request: web.Request) -> web.Response:
    """POST /v1/batches/{id}/cancel."""
    store = request.app[BATCHES]
    with reporting_full_disk():
        return _json(await in_thread(store.cancel, _namespace(request), request.match_info["id"]))


ROUTES = (
    web.post("/v1/files", create_file),
    web.get("/v1/files", list_files),
    web.get("/v1/files/{id}", get_file),
    web.delete("/v1/files/{id}", delete_file),
    web.get("/v1/files/{id}/content", get_content),
    web.post("/v1/batches", create_batch),
    web.get("/v1/batches", list_batches),
    web.get("/v1/batches/{id}", get_batch),
    web.post("/v1/batches/{id}/cancel", cancel_batch),
)


@dataclass(slots=True)
class _Form:
    """The fields of an upload, by their names, and the name of the file."""

    fields: dict[str, str]
    filename: str | None = None

    def checked(self) -> tuple[str, str, int | None]:
        """Name, purpose and lifetime in seconds of the file. Raises InvalidRequest."""
        if self.filename is None:
            raise InvalidRequest("'file' is missing: the upload must have a file.", param="file")
        purpose = self.fields.get("purpose")
        if purpose not in PURPOSES:
            raise InvalidRequest(f"'purpose' must be one of {', '.join(PURPOSES)}.", param="purpose")
        anchor, seconds = self.fields.get("expires_after[anchor]"), self.fields.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return self.filename, purpose, MONTH if purpose == "batch" else None
        number = int(seconds) if seconds is not None and seconds.isascii() and seconds.isdigit() else None
        return self.filename, purpose, parse_lifetime("expires_after", anchor, number)


@contextlib.asynccontextmanager
async def draft_in(store: BatchStore) -> AsyncIterator[FileDraft]:
    """A file to be written, which is removed unless it is committed."""
    drafts = store.files.draft()
    try:
        yield await in_thread(drafts.__enter__)
    finally:
        await in_thread(drafts.__exit__, None, None, None)


async def _read_form(request: web.Request, draft: FileDraft, limit: int) -> _Form:
    """Read an upload, and write its file to the draft as it arrives.

    Raises InvalidRequest, BodyTooLarge, RequestTimeout, and OSError.
    """
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("The body must be multipart/form-data, with the parts file and purpose.")
    if (request.content_length or 0) > limit + _MAX_AROUND_FILE:
        raise BodyTooLarge(f"A file has at most {size_text(limit)}.", param="file")
    form = _Form({})
    reader = await _read(request, request.multipart())
    while (part := await _read(request, reader.next())) is not None:
        name = part.name if isinstance(part, BodyPartReader) else None
        if not isinstance(part, BodyPartReader) or name not in ("file", *_TEXT_FIELDS):
            expected = ", ".join(("file", *_TEXT_FIELDS))
            raise InvalidRequest(f"{str(name)[:100]!r} is no part of an upload, which has {expected}.", param=name)
        if name in form.fields or (name == "file" and form.filename is not None):
            raise InvalidRequest(f"{name!r} is there twice.", param=name)
        if part.headers.get("Content-Transfer-Encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
            raise InvalidRequest(f"{name!r} must not be encoded.", param=name)
        if name == "file":
            form.filename = _filename(part)
            await _read_file(request, part, draft, limit)
        else:
            form.fields[name] = await _read_text(request, part, name)
    return form


async def _read_file(request: web.Request, part: BodyPartReader, draft: FileDraft, limit: int) -> None:
    buffer = bytearray()
    while not part.at_eof():
        buffer += await _read(request, part.read_chunk(_CHUNK))
        if draft.size + len(buffer) > limit:
            raise BodyTooLarge(f"A file has at most {size_text(limit)}.", param="file")
        if len(buffer) >= _WRITTEN_AT_ONCE or part.at_eof():
            await in_thread(draft.write, bytes(buffer))
            buffer.clear()


async def _read_text(request: web.Request, part: BodyPartReader, name: str) -> str:
    text = bytearray()
    while not part.at_eof():
        text += await _read(request, part.read_chunk(_CHUNK))
        if len(text) > _MAX_TEXT:
            raise InvalidRequest(f"{name!r} is longer than {_MAX_TEXT} bytes.", param=name)
    return text.decode("utf-8", "replace")


async def _read(request: web.Request, step: Awaitable[T]) -> T:
    """One step of reading the upload, for which the client has the time that it has for a body."""
    timeout = request.app[SETTINGS].timeouts.client
    try:
        async with asyncio.timeout(timeout):
            return await step
    except TimeoutError as error:
        raise RequestTimeout(f"Nothing of the upload arrived for {timeout:g} s.") from error
    except (ValueError, RuntimeError, HttpProcessingError, web.RequestPayloadError) as error:
        raise InvalidRequest(f"The upload cannot be read: {error}.") from error


def _filename(part: BodyPartReader) -> str:
    name = (part.filename or "file").encode("utf-8", "replace").decode()  # other bytes arrive as surrogates
    if len(name) > _MAX_FILENAME:
        raise InvalidRequest(f"The name of the file is longer than {_MAX_FILENAME} characters.", param="file")
    return name


def _namespace(request: web.Request) -> str:
    return request[CALLER].namespace


def _query(request: web.Request, names: Collection[str]) -> Mapping[str, str]:
    """The parameters of the query. Raises InvalidRequest for one that is not in `names`."""
    for name in request.query:
        if name not in names:
            raise InvalidRequest(
                f"{name[:100]!r} is no parameter of this list, which has {', '.join(names)}.", param=name
            )
    return request.query


def _limit(query: Mapping[str, str], default: int, most: int) -> int:
    given = query.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= most):
        raise InvalidRequest(f"'limit' must be a whole number from 1 to {most}.", param="limit")
    return int(given)


def _list(page: Page[FileObject] | Page[Batch]) -> web.Response:
    first, last = (page.data[0].id, page.data[-1].id) if page.data else (None, None)
    return _json({"object": "list", "data": page.data, "first_id": first, "last_id": last, "has_more": page.has_more})


def _json(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
