"""The Python client `openai`, sync and async, driven like the npm one: see node.py."""

import asyncio
from collections.abc import Callable
from functools import reduce
from typing import Any

import openai


class AsyncPythonClient:
    """openai.AsyncOpenAI."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    async def call(
        self,
        path: str,
        params: Any = None,
        *,
        headers: dict[str, str] | None = None,
        abort_after: int | None = None,
    ) -> dict[str, Any]:
        """What a program would have seen of the call: {value, headers}, {chunks} or {error}."""
        owner, _, method = path.rpartition(".")
        args, named = _arguments(params, headers)
        async with openai.AsyncOpenAI(**self._options) as client:
            resource: Any = reduce(getattr, owner.split("."), client)
            try:
                if method == "stream":
                    async with resource.stream(*args, **named) as helper:
                        async for _ in helper:
                            pass
                        return {"value": _dump(await helper.get_final_completion())}
                if named.get("stream"):
                    return await self._collect(await resource.create(*args, **named), abort_after)
                raw = await getattr(resource.with_raw_response, method)(*args, **named)
                return {"value": _dump(raw.parse()), "headers": dict(raw.headers)}
            except openai.OpenAIError as error:
                return {"error": _describe(error)}

    async def _collect(self, stream: Any, abort_after: int | None) -> dict[str, Any]:
        chunks: list[Any] = []
        try:
            async for chunk in stream:
                chunks.append(_dump(chunk))
                if len(chunks) == abort_after:
                    await stream.close()
                    break
        except openai.OpenAIError as error:
            return {"chunks": chunks, "error": _describe(error)}
        return {"chunks": chunks}


class SyncPythonClient:
    """openai.OpenAI, in a thread of its own."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    async def call(
        self,
        path: str,
        params: Any = None,
        *,
        headers: dict[str, str] | None = None,
        abort_after: int | None = None,
    ) -> dict[str, Any]:
        """What a program would have seen of the call: {value, headers}, {chunks} or {error}."""
        return await asyncio.to_thread(self._call, path, params, headers, abort_after)

    def _call(self, path: str, params: Any, headers: dict[str, str] | None, abort_after: int | None) -> dict[str, Any]:
        owner, _, method = path.rpartition(".")
        args, named = _arguments(params, headers)
        with openai.OpenAI(**self._options) as client:
            resource: Any = reduce(getattr, owner.split("."), client)
            try:
                if method == "stream":
                    with resource.stream(*args, **named) as helper:
                        return {"value": _dump(helper.get_final_completion())}
                if named.get("stream"):
                    return self._collect(resource.create(*args, **named), abort_after)
                raw = getattr(resource.with_raw_response, method)(*args, **named)
                return {"value": _dump(raw.parse()), "headers": dict(raw.headers)}
            except openai.OpenAIError as error:
                return {"error": _describe(error)}

    def _collect(self, stream: Any, abort_after: int | None) -> dict[str, Any]:
        chunks: list[Any] = []
        try:
            for chunk in stream:
                chunks.append(_dump(chunk))
                if len(chunks) == abort_after:
                    stream.close()
                    break
        except openai.OpenAIError as error:
            return {"chunks": chunks, "error": _describe(error)}
        return {"chunks": chunks}


def _arguments(params: Any, headers: dict[str, str] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fields that the client has no parameter for travel in extra_body, as its users send them."""
    if isinstance(params, str):
        return (params,), {"extra_headers": headers}
    named = {**(params or {}), "extra_headers": headers}
    extra = {name: named.pop(name) for name in list(named) if name.startswith("x_")}
    return (), {**named, "extra_body": extra} if extra else named


def _dump(value: Any) -> Any:
    dump: Callable[..., Any] | None = getattr(value, "model_dump", None)
    if dump is None:
        return value
    dumped = dump(mode="json", exclude_unset=True, warnings=False)
    return dumped["data"] if dumped.get("object") == "list" else dumped


def _describe(error: openai.OpenAIError) -> dict[str, Any]:
    said = {name: getattr(error, name, None) for name in ("message", "param", "code")}
    return {"name": type(error).__name__, "status": getattr(error, "status_code", None), **said}
