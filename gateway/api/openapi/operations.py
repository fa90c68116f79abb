"""The description of every operation, by its method and path. `*` is a route for every method, described in words."""

from typing import Any

from gateway.api.dashboard.dashboard import PARTS
from gateway.api.openapi import anthropic_schemas as anthropic
from gateway.api.openapi import file_schemas as files
from gateway.api.openapi import keepgate_schemas as keepgate
from gateway.api.openapi import ollama_schemas as ollama
from gateway.api.openapi import openai_schemas as openai
from gateway.api.openapi.cost_operations import COST_OPERATIONS
from gateway.api.openapi.inspection_operations import INSPECTION_OPERATIONS
from gateway.api.openapi.key_operations import KEY_OPERATIONS
from gateway.api.openapi.operation import (
    ANYTHING,
    BODY_ERRORS,
    CACHE_HEADERS,
    COST_HEADERS,
    ENTRY_HEADERS,
    FORM,
    JSON,
    SEMANTIC_HEADERS,
    TEXT,
    UPSTREAM_ERRORS,
    Operation,
    Parameter,
    Schema,
)
from gateway.api.openapi.routing_operations import ROUTING_OPERATIONS
from gateway.batches.batch import Batch
from gateway.batches.files import PURPOSES, FileObject
from gateway.surfaces.whole import ENDPOINTS

EVENTS = {"text/event-stream": {"description": "Server-sent events."}}
LINES = {"application/x-ndjson": {"description": "One JSON object on each line."}}
_ASKED_OF_CACHE = (
    "Cache-Control",
    "x-keepgate-max-risk",
    "x-keepgate-threshold",
    "x-keepgate-reuse",
    "x-keepgate-tags",
    "x-keepgate-profile",
)
_NAME = {"type": "string", "minLength": 1}
_ANTHROPIC = ("anthropic-version", "anthropic-beta")


def _prompt(tag: str, summary: str, description: str, asked: Schema, answer: Any, *sent: str) -> Operation:
    """POST to an endpoint that answers a prompt."""
    return Operation(
        tag=tag,
        summary=summary,
        description=description,
        sent=(*_ASKED_OF_CACHE, *sent),
        body={JSON: asked},
        answer=answer,
        told=CACHE_HEADERS,
        may_tell=(*ENTRY_HEADERS, *SEMANTIC_HEADERS, "x-keepgate-prefix-tokens"),
        errors=(*BODY_ERRORS, 404, *UPSTREAM_ERRORS),
        passes_on=True,
    )


def _ollama(summary: str, description: str, asked: Schema, answer: Any, **others: Any) -> Operation:
    """POST to an endpoint of Ollama, whose answer may come without the cache."""
    return Operation(
        tag="Ollama",
        summary=summary,
        description=description,
        body={JSON: asked},
        answer=answer,
        errors=(*BODY_ERRORS, 404, *UPSTREAM_ERRORS),
        passes_on=True,
        **others,
    )


def _whole(summary: str, answer: Any, **bodies: Schema) -> Operation:
    return Operation(
        tag="OpenAI",
        summary=summary,
        description="Stored as the bytes that the upstream answers with, for equal requests.",
        sent=("Cache-Control",),
        body={{"json": JSON, "form": FORM}[kind]: schema for kind, schema in bodies.items()},
        answer=answer,
        told=CACHE_HEADERS,
        may_tell=ENTRY_HEADERS,
        errors=(*BODY_ERRORS, 404, *UPSTREAM_ERRORS),
        passes_on=True,
    )


_WHOLE = {
    "moderations": _whole("Whether texts are harmful", {JSON: files.Results}, json=files.ModerationRequest),
    "rerank": _whole(
        "Order documents by a query", {JSON: (files.Results, {"type": "array"})}, json=files.RerankRequest
    ),
    "score": _whole("How similar texts are", {JSON: (files.Results, {"type": "array"})}, json=files.ScoreRequest),
    "audio.transcriptions": _whole("The text of a recording", {"*/*": ANYTHING}, form=files.AudioForm),
    "audio.translations": _whole("The text of a recording, in English", {"*/*": ANYTHING}, form=files.AudioForm),
    "audio.speech": _whole("A recording of a text", {"*/*": ANYTHING}, json=files.SpeechRequest),
    "images": _whole("Images", {JSON: files.Results}, json=files.ImagesRequest, form=files.ImagesForm),
}

_AFTER = Parameter("after", "The id after which the page begins.")
_ORDER = Parameter("order", "Of the times of creation.", {"enum": ["asc", "desc"], "default": "desc"})


def _limit(default: int, most: int) -> Parameter:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return Parameter("limit", "The most that a page has.", schema)


def _own(tag: str, summary: str, answer: Any, errors: tuple[int, ...] = (), **others: Any) -> Operation:
    """What the gateway answers itself."""
    content = answer if isinstance(answer, dict) else {JSON: answer}
    return Operation(tag=tag, summary=summary, answer=content, errors=errors, **others)


_MODEL = Parameter("model", "Only of this model.")
_STORES: dict[str, Any] = {
    "operator": True,
    "description": "The request goes to all upstreams; the answer has the reply of each, or its error.",
}

OPERATIONS: dict[tuple[str, str], Operation] = {
    **KEY_OPERATIONS,
    **COST_OPERATIONS,
    **ROUTING_OPERATIONS,
    **INSPECTION_OPERATIONS,
    ("POST", "/v1/chat/completions"): _prompt(
        "OpenAI",
        "Answer a chat",
        "A stream has events of chat.completion.chunk objects and ends with `data: [DONE]`.",
        openai.ChatCompletionRequest,
        {JSON: openai.ChatCompletion, **EVENTS},
    ),
    ("POST", "/v1/completions"): _prompt(
        "OpenAI",
        "Continue a text",
        "A stream has events of text_completion objects and ends with `data: [DONE]`.",
        openai.CompletionRequest,
        {JSON: openai.Completion, **EVENTS},
    ),
    ("POST", "/v1/embeddings"): Operation(
        tag="OpenAI",
        summary="Embed texts",
        description="Each input is an entry of the cache: only those that are not stored go to an upstream.",
        sent=("Cache-Control",),
        body={JSON: openai.EmbeddingsRequest},
        answer={JSON: openai.EmbeddingList},
        told=CACHE_HEADERS,
        may_tell=("x-keepgate-model", *COST_HEADERS),
        errors=(*BODY_ERRORS, *UPSTREAM_ERRORS),
        passes_on=True,
    ),
    **{("POST", path): _WHOLE[endpoint.family] for endpoint in ENDPOINTS for path in endpoint.paths},
    ("GET", "/v1/models"): _own(
        "OpenAI",
        "The models of all upstreams, each once",
        {JSON: (openai.ModelList, anthropic.AnthropicModelPage)},
        UPSTREAM_ERRORS,
        description="In Anthropic's form for clients that send `anthropic-version`.",
        sent=("anthropic-version",),
        passes_on=True,
    ),
    ("GET", "/v1/models/{model}"): _own(
        "OpenAI",
        "One model, from an upstream that has it",
        {JSON: (openai.ModelObject, anthropic.AnthropicModel)},
        (404, *UPSTREAM_ERRORS),
        description="The name may have slashes. In Anthropic's form for clients that send `anthropic-version`.",
        sent=("anthropic-version",),
        passes_on=True,
    ),
    ("POST", "/v1/responses"): _prompt(
        "Responses",
        "Answer with the Responses API",
        "A stream has the events of the Responses API. An upstream without this API is asked for a chat completion.",
        openai.ResponsesRequest,
        {JSON: openai.Response, **EVENTS},
    ),
    ("GET", "/v1/responses/{id}"): _own(
        "Responses", "A response that was kept", openai.Response, (404, *UPSTREAM_ERRORS), passes_on=True
    ),
    ("DELETE", "/v1/responses/{id}"): _own(
        "Responses", "Forget a response", openai.DeletedResponse, (404, *UPSTREAM_ERRORS), passes_on=True
    ),
    ("GET", "/v1/responses/{id}/input_items"): _own(
        "Responses",
        "What a response answered",
        openai.InputItemList,
        (400, 404, *UPSTREAM_ERRORS),
        query=(_limit(20, 100), _AFTER, _ORDER),
        passes_on=True,
    ),
    ("POST", "/v1/generate"): _prompt(
        "Generation",
        "One text for one prompt",
        "A stream has events with pieces of `text`, then one with the rest of the answer, and `data: [DONE]`.",
        keepgate.GenerateRequest,
        {JSON: keepgate.Generation, **EVENTS},
    ),
    ("POST", "/v1/generate/batch"): _own(
        "Generation",
        "Texts for many prompts",
        keepgate.GenerationBatch,
        BODY_ERRORS,
        description="Each item is a request to POST /v1/generate, answered apart from the others.",
        sent=_ASKED_OF_CACHE,
        body={JSON: keepgate.GenerateBatchRequest},
    ),
    ("POST", "/v1/messages"): _prompt(
        "Anthropic",
        "Answer with a message",
        "A stream has the events of Anthropic's API. An upstream without it is asked for a chat completion.",
        anthropic.MessagesRequest,
        {JSON: anthropic.Message, **EVENTS},
        *_ANTHROPIC,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        tag="Anthropic",
        summary="The number of tokens of a prompt",
        description="From an upstream that has this endpoint, or else a tokenizer at /tokenize.",
        sent=_ANTHROPIC,
        body={JSON: anthropic.CountTokensRequest},
        answer={JSON: anthropic.TokenCount},
        errors=(*BODY_ERRORS, 404, *UPSTREAM_ERRORS),
        passes_on=True,
    ),
    ("POST", "/api/chat"): _ollama(
        "Answer a chat",
        "Lines of JSON, unless `stream` is false.",
        ollama.OllamaChatRequest,
        {JSON: ollama.OllamaChatAnswer, **LINES},
        sent=_ASKED_OF_CACHE,
        may_tell=(*CACHE_HEADERS, *ENTRY_HEADERS, *SEMANTIC_HEADERS),
    ),
    ("POST", "/api/generate"): _ollama(
        "Answer a prompt",
        "Lines of JSON, unless `stream` is false.",
        ollama.OllamaGenerateRequest,
        {JSON: ollama.OllamaGenerateAnswer, **LINES},
        sent=_ASKED_OF_CACHE,
        may_tell=(*CACHE_HEADERS, *ENTRY_HEADERS, *SEMANTIC_HEADERS),
    ),
    ("POST", "/api/embed"): _ollama(
        "Embed texts",
        "Each input is an entry of the cache, which embeddings of OpenAI's form share.",
        ollama.OllamaEmbedRequest,
        {JSON: ollama.OllamaEmbeddings},
        sent=("Cache-Control",),
        may_tell=(*CACHE_HEADERS, *COST_HEADERS, "x-keepgate-model", "x-keepgate-ignored-fields"),
    ),
    ("POST", "/api/embeddings"): _ollama(
        "Embed one text",
        "The older form of /api/embed.",
        ollama.OllamaEmbeddingRequest,
        {JSON: ollama.OllamaEmbedding},
        sent=("Cache-Control",),
        may_tell=(*CACHE_HEADERS, *COST_HEADERS, "x-keepgate-model", "x-keepgate-ignored-fields"),
    ),
    ("POST", "/api/show"): _ollama(
        "Describe a model",
        "From an upstream that has Ollama's API, or else what the model's upstream says of it.",
        ollama.OllamaModelRequest,
        {JSON: ollama.OllamaModelDescription},
    ),
    ("POST", "/api/pull"): _ollama(
        "Whether a model is there",
        "A model that an upstream lists is there; another cannot be fetched.",
        ollama.OllamaPullRequest,
        {JSON: ollama.OllamaStatus},
    ),
    ("GET", "/api/tags"): _own(
        "Ollama", "The models of all upstreams", ollama.OllamaModels, UPSTREAM_ERRORS, passes_on=True
    ),
    ("GET", "/api/ps"): _own(
        "Ollama", "The same: all are loaded", ollama.OllamaRunningModels, UPSTREAM_ERRORS, passes_on=True
    ),
    ("GET", "/api/version"): _own("Ollama", "The version of Ollama whose API this is", ollama.OllamaVersion),
    ("POST", "/v1/files"): _own(
        "Files and batches",
        "Upload a file",
        FileObject,
        (*BODY_ERRORS, 507),
        body={FORM: files.NewFile},
    ),
    ("GET", "/v1/files"): _own(
        "Files and batches",
        "The files of the tenant",
        files.FileList,
        (400,),
        query=(
            _limit(10_000, 10_000),
            _AFTER,
            _ORDER,
            Parameter("purpose", "Only files with this one, such as " + ", ".join(PURPOSES) + "."),
        ),
    ),
    ("GET", "/v1/files/{id}"): _own("Files and batches", "One file", FileObject, (404,)),
    ("DELETE", "/v1/files/{id}"): _own("Files and batches", "Delete a file", files.DeletedFile, (404,)),
    ("GET", "/v1/files/{id}/content"): _own(
        "Files and batches", "The content of a file", {"application/octet-stream": TEXT}, (404,)
    ),
    ("POST", "/v1/batches"): _own(
        "Files and batches",
        "Run the requests of a file",
        Batch,
        (*BODY_ERRORS, 404, 507),
        body={JSON: files.NewBatch},
    ),
    ("GET", "/v1/batches"): _own(
        "Files and batches", "The batches of the tenant", files.BatchList, (400,), query=(_limit(20, 100), _AFTER)
    ),
    ("GET", "/v1/batches/{id}"): _own("Files and batches", "One batch", Batch, (404,)),
    ("POST", "/v1/batches/{id}/cancel"): _own("Files and batches", "Cancel a batch", Batch, (400, 404, 507)),
    ("DELETE", "/v1/cache/entries/{id}"): _own(
        "Inspection",
        "Forget one entry",
        keepgate.DeletedEntry,
        (400, 401, 403, 404, 503),
        description="The tenant that owns the entry needs no admin key.",
        query=(Parameter("reason", "The answer was wrong: the semantic cache learns from it.", {"enum": ["wrong"]}),),
    ),
    ("DELETE", "/v1/cache"): _own(
        "Inspection",
        "Purge everything, a namespace, a model, a tag, a layer, or what is old; or erase a tenant",
        keepgate.Purged,
        (400, 503),
        operator=True,
        query=(
            Parameter("namespace", "Only this one; not with `model`.", _NAME),
            _MODEL,
            Parameter("tag", "Only answers to requests with this tag; not with the others.", _NAME),
            Parameter(
                "layer",
                "Serve no answer of before now to similar questions; not with the others.",
                {"enum": ["semantic"]},
            ),
            Parameter(
                "min_age", "Only what is so many seconds old; not with the others.", {"type": "number", "minimum": 0}
            ),
            Parameter(
                "tenant",
                "Remove everything that is stored of this namespace, and look again; not with the others.",
                _NAME,
            ),
        ),
    ),
    ("GET", "/v1/cache/prefix"): _own(
        "Inspection", "The state of the upstreams' prefix stores", keepgate.RepliesOfStores, (400,), **_STORES
    ),
    ("DELETE", "/v1/cache/prefix"): _own(
        "Inspection",
        "Empty the prefix stores",
        keepgate.RepliesOfStores,
        (400, 404, *UPSTREAM_ERRORS),
        query=(_MODEL,),
        passes_on=True,
        **_STORES,
    ),
    ("POST", "/v1/cache/prefix/{operation}"): _own(
        "Inspection",
        "Look up, pin or unpin the blocks of a prompt",
        keepgate.RepliesOfStores,
        (*BODY_ERRORS, 404, *UPSTREAM_ERRORS),
        path={"operation": {"enum": ["lookup", "pin", "unpin"]}},
        body={JSON: keepgate.PromptOfStore},
        passes_on=True,
        **_STORES,
    ),
    ("GET", "/"): _own("Health", "A page for a browser, with a chat to try", {"text/html": TEXT}),
    ("GET", "/dashboard"): _own(
        "Health", "A page for operators, which asks for the admin key where one is set", {"text/html": TEXT}
    ),
    ("GET", "/dashboard/{file}"): _own(
        "Health",
        "A file of the dashboard",
        {"text/javascript": TEXT, "text/css": TEXT},
        (404,),
        path={"file": {"enum": list(PARTS)}},
    ),
    ("GET", "/openapi.json"): _own("Health", "This document", {JSON: {"type": "object"}}),
    ("GET", "/health"): _own("Health", "The process answers", keepgate.Health),
    ("GET", "/ready"): _own(
        "Health", "An upstream can be reached", keepgate.Readiness, further={503: {JSON: keepgate.Readiness}}
    ),
    ("GET", "/metrics"): _own("Health", "Metrics in Prometheus' text format", {"text/plain": TEXT}),
}

IN_WORDS = {
    "/v1/{rest}": "Any other request under /v1 is relayed to an upstream as it is, whatever its method, and never"
    " cached. Its answer is the upstream's, with `x-keepgate-cache: bypass`.",
    "/v1/cache{rest}": "Nothing under /v1/cache is relayed: what is not described here is 404.",
    "/v1/keys{rest}": "Nor is anything under /v1/keys.",
    "/v1/teams{rest}": "Nor is anything under /v1/teams.",
}
"""Routes for every method, which have no operations of their own."""
