"""Traces as the settings have them, and the names of OpenTelemetry's conventions for generative AI.

The names are those of https://github.com/open-telemetry/semantic-conventions-genai. No prompt and no answer is in them.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from gateway.settings.fields import SettingsError
from gateway.settings.operations import TraceSettings
from telemetry.tracing import opening
from telemetry.tracing.span import Tracing, TracingUnavailable, Value

SERVICE = "keepgate-gateway"

_CHATS = frozenset({"chat.completions", "messages", "responses", "ollama.chat", "generate"})
_TEXTS = frozenset({"completions", "ollama.generate"})
# By the end of an upstream's host; for all others it is what they are compatible with.
_PROVIDERS = {
    "api.anthropic.com": "anthropic",
    "openai.azure.com": "azure.ai.openai",
    "amazonaws.com": "aws.bedrock",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "aiplatform.googleapis.com": "gcp.vertex_ai",
    "api.cohere.com": "cohere",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
}


@asynccontextmanager
async def open_tracing(settings: TraceSettings, service: str = SERVICE) -> AsyncIterator[Tracing]:
    """Traces of this process; none with the exporter `none`. Raises SettingsError when they cannot be exported."""
    if settings.exporter == "file" and settings.file is None:
        raise SettingsError("traces.file: traces.exporter is file: name the file")
    endpoint = settings.endpoint if settings.exporter == "otlp" else ""
    file = settings.file or "" if settings.exporter == "file" else ""
    opened = opening.open_tracing(service, endpoint=endpoint, file=file, share=settings.share)
    try:
        tracing = await opened.__aenter__()
    except TracingUnavailable as error:
        raise SettingsError(f"traces: {error}") from error
    try:
        yield tracing
    finally:
        await opened.__aexit__(None, None, None)


def operation_of(family: str) -> str:
    """`gen_ai.operation.name` of a form of API; its own name where the conventions have none."""
    return "chat" if family in _CHATS else "text_completion" if family in _TEXTS else family


def provider_of(url: str) -> str:
    """`gen_ai.provider.name` of an upstream: that of its host, else of the API that it is compatible with."""
    host = urlsplit(url).hostname or ""
    return next((name for end, name in _PROVIDERS.items() if host == end or host.endswith(f".{end}")), "openai")


def call_attributes(family: str, model: str, *, stream: bool) -> dict[str, Value]:
    """Of the span of a request to an upstream, whose kind is `client` and whose name `OPERATION MODEL`."""
    return {
        "gen_ai.operation.name": operation_of(family),
        "gen_ai.request.model": model,
        "gen_ai.request.stream": stream,
    }


def server_attributes(url: str) -> dict[str, Value]:
    """Of the same span, when it is known which upstream has answered."""
    parts = urlsplit(url)
    attributes: dict[str, Value] = {"gen_ai.provider.name": provider_of(url), "server.address": parts.hostname or ""}
    return {**attributes, "server.port": parts.port} if parts.port else attributes


def usage_attributes(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, finish_reasons: Sequence[str] = ()
) -> dict[str, Value]:
    """Of the same span, when the answer is whole."""
    attributes: dict[str, Value] = {
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": completion_tokens,
    }
    if cached_tokens:
        attributes["gen_ai.usage.cache_read.input_tokens"] = cached_tokens
    return {**attributes, "gen_ai.response.finish_reasons": list(finish_reasons)} if finish_reasons else attributes
