"""The Files API, through OpenAI's own client and with uploads that it would not send."""

import asyncio
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from yarl import URL

from gateway.batches.files import FileStore
from tests.gateway.batches.conftest import MAX_FILE, BatchStage
from tests.waiting import until

_BOUNDARY = "xxxx"
_FORM = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}", "Authorization": "Bearer alice"}


def part(name: str, content: bytes, *headers: str, filename: str | None = None) -> bytes:
    """A part of an upload, with its boundary."""
    disposition = f'Content-Disposition: form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
    head = "\r\n".join((f"--{_BOUNDARY}", disposition, *headers, "", ""))
    return head.encode() + content + b"\r\n"


END = f"--{_BOUNDARY}--\r\n".encode()


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """No file of this process grows beyond `limit` bytes: what the system says is what it says on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(stage: BatchStage) -> list[str]:
    """The files of the store on disk, whole or not."""
    return sorted(str(path.relative_to(stage.state)) for path in stage.state.rglob("content"))


async def refusal(stage: BatchStage, body: bytes, headers: dict[str, str] = _FORM) -> tuple[int, dict[str, Any]]:
    """Status and error of an upload; nothing of it is left."""
    session = await stage.session()
    async with session.post("/v1/files", data=body, headers=headers) as response:
        error: dict[str, Any] = (await response.json())["error"]
    assert contents(stage) == []
    return response.status, error


async def test_a_file_comes_back_as_it_was(stage: BatchStage) -> None:
    """Its object has OpenAI's fields, its content the same bytes; by default a batch's file expires after 30 days."""
    client = (await stage.client()).sdk
    content = bytes(range(256)) * 3000
    made = await client.files.create(file=("größe \U0001f600.jsonl", content), purpose="batch")
    assert made.model_extra == {}
    assert made.filename == "größe \U0001f600.jsonl"
    assert made.bytes == len(content)
    assert made.purpose == "batch"
    assert made.expires_at == made.created_at + 30 * 86_400
    assert abs(made.created_at - time.time()) < 60
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == content
    kept = await client.files.create(file=("a", b""), purpose="user_data")
    assert kept.expires_at is None
    assert (await client.files.content(kept.id)).content == b""


async def test_the_head_of_a_content(stage: BatchStage) -> None:
    """HEAD says how long it is, and the connection stays usable."""
    made = await (await stage.client()).sdk.files.create(file=("a", b"abc"), purpose="batch")
    session = await stage.session()
    for _ in range(2):
        headers = {"Authorization": "Bearer alice"}
        async with session.head(f"/v1/files/{made.id}/content", headers=headers) as response:
            assert response.status == 200
            assert response.headers["Content-Length"] == "3"
            assert await response.read() == b""


async def test_a_deleted_file_is_gone(stage: BatchStage) -> None:
    """Its object, its content, its place in the list and its bytes on disk."""
    client = (await stage.client()).sdk
    made = await client.files.create(file=("a", b"abc"), purpose="batch")
    deleted = await client.files.delete(made.id)
    assert deleted.model_dump() == {"id": made.id, "object": "file", "deleted": True}
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(made.id)
    assert (await client.files.list()).data == []
    assert contents(stage) == []


async def test_a_download_goes_on_when_the_file_is_deleted(stage: BatchStage) -> None:
    """Who has begun to read it gets all of it."""
    client = (await stage.client()).sdk
    content = bytes(MAX_FILE)
    made = await client.files.create(file=("a", content), purpose="batch")
    session = await stage.session()
    async with session.get(f"/v1/files/{made.id}/content", headers={"Authorization": "Bearer alice"}) as response:
        await client.files.delete(made.id)
        assert response.headers["Content-Type"] == "application/octet-stream"
        assert await response.read() == content


async def test_files_are_listed_in_pages(stage: BatchStage) -> None:
    """The newest first unless asked otherwise, of one purpose or all; the client's iterator goes through all pages."""
    client = (await stage.client()).sdk
    ids = [
        (await client.files.create(file=("a", b"abc"), purpose=purpose)).id
        for purpose in ("batch", "vision", "batch", "batch")
    ]
    assert [file.id for file in (await client.files.list()).data] == ids[::-1]
    assert [file.id async for file in client.files.list(limit=1, order="asc")] == ids
    page = await client.files.list(limit=2, purpose="batch")
    assert [file.id for file in page.data] == [ids[3], ids[2]]
    assert page.has_more
    assert [file.id async for file in client.files.list(limit=2, purpose="batch")] == [ids[3], ids[2], ids[0]]
    await client.files.delete(ids[2])
    assert [file.id for file in (await client.files.list(after=ids[2])).data] == [ids[1], ids[0]]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "10001"}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "../x"}, "after"),
        ({"before": "x"}, "before"),
    ],
)
async def test_an_invalid_query_is_refused_by_parameter(stage: BatchStage, query: dict[str, str], param: str) -> None:
    """The error names the parameter."""
    session = await stage.session()
    async with session.get("/v1/files", params=query) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_another_tenants_file_is_not_found(stage: BatchStage) -> None:
    """Neither to read nor to delete nor to list."""
    alice, bob = (await stage.client("alice")).sdk, (await stage.client("bob")).sdk
    made = await alice.files.create(file=("a", b"abc"), purpose="batch")
    for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(made.id)
    assert (await bob.files.list()).data == []
    assert (await alice.files.content(made.id)).content == b"abc"


@pytest.mark.parametrize(
    "file_id",
    [
        "..",
        "..%2F..%2Fbatches",
        "file-",
        "file-..%2F" + "0" * 29,
        "file-" + "0" * 32,
        "drafts",
        "%00",
        "file-" + "%C3%89" * 32,
    ],
)
async def test_no_identifier_leads_elsewhere(stage: BatchStage, file_id: str) -> None:
    """What is no identifier of a file is not found, whatever is asked of it."""
    session = await stage.session()
    for method, path in (("GET", file_id), ("DELETE", file_id), ("GET", f"{file_id}/content")):
        async with session.request(method, URL(f"{stage.url}/v1/files/{path}", encoded=True)) as response:
            assert response.status == 404


async def test_a_file_expires(stage: BatchStage) -> None:
    """An expired file is not found, and the next cleaning removes it."""
    client = (await stage.client()).sdk
    made = await client.files.create(
        file=("a", b"abc"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    files = stage.store.files
    ((namespace, _),) = files._folders.all()
    with files.draft() as draft:
        draft.write(b"old")
        old = draft.commit(namespace, "old", "batch", 3600, created_at=int(time.time()) - 3600)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(old.id)
    assert [file.id for file in (await client.files.list()).data] == [made.id]
    stage.store.clean()
    assert contents(stage) == [f"files/{namespace}/{made.id}/content"]


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([part("purpose", b"batch")], "file"),
        ([part("file", b"abc", filename="a")], "purpose"),
        ([part("purpose", b"party"), part("file", b"abc", filename="a")], "purpose"),
        ([part("purpose", b"\xff"), part("file", b"abc", filename="a")], "purpose"),
        ([part("purpose", b"x" * 2000)], "purpose"),
        ([part("purpose", b"batch")] * 2, "purpose"),
        ([part("file", b"abc", filename="a")] * 2, "file"),
        ([part("colour", b"red")], "colour"),
        ([part("file", b"abc", filename="a" * 300)], "file"),
        ([part("file", b"YWJj", "Content-Transfer-Encoding: base64", filename="a")], "file"),
        ([part("file", b"", "Content-Type: multipart/mixed; boundary=y", filename="a")], None),
        (
            [part("file", b"a", filename="a"), part("purpose", b"batch"), part("expires_after[seconds]", b"3600")],
            "expires_after.anchor",
        ),
        (
            [
                part("file", b"a", filename="a"),
                part("purpose", b"batch"),
                part("expires_after[anchor]", b"created_at"),
                part("expires_after[seconds]", b"1e5"),
            ],
            "expires_after.seconds",
        ),
    ],
)
async def test_an_invalid_upload_is_refused_by_part(stage: BatchStage, parts: list[bytes], param: str | None) -> None:
    """The error names the part, and nothing is kept."""
    status, error = await refusal(stage, b"".join(parts) + END)
    assert status == 400
    assert error["param"] == param


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content-Type": "application/json"}, b"{}"),
        ({"Content-Type": "multipart/form-data"}, b"{}"),
        (_FORM, b""),
        (_FORM, b"no boundary at all"),
        (_FORM, part("file", b"abc", filename="a")),
        (_FORM, b"--xxxx\r\nno header\r\n\r\nabc\r\n" + END),
        (_FORM, b"--xxxx\r\n" + b"a: b\r\n" * 500 + b"\r\nabc\r\n" + END),
        (_FORM, part("_charset_", b"x" * 99) + END),
    ],
)
async def test_what_is_no_upload_is_refused(stage: BatchStage, headers: dict[str, str], body: bytes) -> None:
    """Whatever bytes arrive, the answer is an error of the request."""
    status, _ = await refusal(stage, body, headers)
    assert status == 400


@pytest.mark.parametrize("surplus", [1, 2**20])
async def test_a_file_over_the_limit_is_refused(stage: BatchStage, surplus: int) -> None:
    """Both where the length is announced and where it shows as it arrives; a file of exactly the limit is kept."""
    client = (await stage.client()).sdk
    with pytest.raises(openai.APIStatusError) as refused:
        await client.files.create(file=("a", bytes(MAX_FILE + surplus)), purpose="batch")
    assert refused.value.status_code == 413
    assert contents(stage) == []
    assert (await client.files.create(file=("a", bytes(MAX_FILE)), purpose="batch")).bytes == MAX_FILE


async def test_an_upload_that_breaks_off_leaves_nothing(stage: BatchStage) -> None:
    """When the client goes away in the middle, what it has sent is removed."""
    session = await stage.session()
    started = asyncio.Event()

    async def half() -> Any:
        yield part("file", bytes(2**19), filename="a")[:-2]
        started.set()
        await asyncio.Event().wait()

    upload = asyncio.create_task(session.post("/v1/files", data=half(), headers=_FORM).__aenter__())
    await started.wait()
    await until(lambda: len(contents(stage)) == 1)
    upload.cancel()
    await until(lambda: contents(stage) == [])
    assert list((stage.state / "files" / "drafts").iterdir()) == []


async def test_an_upload_that_stops_is_ended(unserved: BatchStage) -> None:
    """A client that sends nothing more for its time gets 408."""
    await unserved.serve(client_timeout=0.2)
    session = await unserved.session()

    async def half() -> Any:
        yield part("file", b"abc", filename="a")[:-2]
        await asyncio.Event().wait()

    async with session.post("/v1/files", data=half(), headers=_FORM) as response:
        assert response.status == 408
    assert contents(unserved) == []


async def test_a_full_disk_is_an_error_of_its_own(stage: BatchStage) -> None:
    """The upload gets 507 with a code, and leaves nothing; the next one succeeds when there is room."""
    client = (await stage.client()).sdk
    with file_size_limit(2**17), pytest.raises(openai.InternalServerError) as refused:
        await client.files.create(file=("a", bytes(2**18)), purpose="batch")
    assert refused.value.status_code == 507
    assert refused.value.code == "storage_full"
    assert contents(stage) == []
    assert list((stage.state / "files" / "drafts").iterdir()) == []
    await client.files.create(file=("a", bytes(2**18)), purpose="batch")


async def test_a_file_with_a_damaged_record_is_not_found(stage: BatchStage) -> None:
    """The others are listed all the same."""
    client = (await stage.client()).sdk
    damaged = await client.files.create(file=("a", b"abc"), purpose="batch")
    other = await client.files.create(file=("b", b"abc"), purpose="batch")
    (record,) = stage.state.rglob(f"{damaged.id}/record.json")
    record.write_bytes(b'{"id"')
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(damaged.id)
    assert [file.id for file in (await client.files.list()).data] == [other.id]


async def test_a_draft_of_this_process_is_not_taken_for_abandoned(stage: BatchStage) -> None:
    """Another process that starts removes drafts of processes that were killed, and no others."""
    drafts = stage.state / "files" / "drafts"
    with stage.store.files.draft() as draft:
        draft.write(b"abc")
        (drafts / "left").mkdir()
        (drafts / "left" / "content").write_bytes(b"half")
        FileStore(stage.state / "files", MAX_FILE).clean()
        assert not (drafts / "left").exists()
        made = draft.commit("public", "a", "batch", None)
    assert stage.store.files.get("public", made.id) == made
