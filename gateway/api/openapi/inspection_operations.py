"""The operations that look into the cache."""

from gateway.api.openapi.keepgate_schemas import CacheStats
from gateway.api.openapi.openai_schemas import ChatCompletionRequest
from gateway.api.openapi.operation import JSON, TEXT, Operation, Parameter
from gateway.api.operator.entries import CacheEntry, EntryPage
from gateway.api.operator.explanation import RequestExplanation
from gateway.api.operator.requests import RecentRequestList
from gateway.api.operator.semantic import (
    MAX_DECISIONS,
    MAX_DELTAS,
    MAX_STEPS,
    OUTCOMES,
    STEPS,
    VERDICTS,
    DecisionPage,
    WhatIfFigures,
)
from gateway.api.operator.statistics import Timeline
from gateway.batches.batch import ENDPOINTS, Batch
from gateway.telemetry.statistics import WINDOWS

_BY = Parameter("by", "Also for each of these.", {"enum": ["model", "key", "namespace"]})
_NUMBER = {"type": "number", "minimum": 0}
_STEPS = {"type": "integer", "minimum": 1, "maximum": MAX_STEPS}

INSPECTION_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/v1/cache/stats"): Operation(
        tag="Inspection",
        summary="The figures of the cache",
        description="Of each layer, in windows of time, and by model, key or namespace.",
        query=(_BY, Parameter("window", "Of `by`; 1h by default.", {"enum": list(WINDOWS)})),
        answer={JSON: CacheStats},
        errors=(400, 401, 403),
        operator=True,
    ),
    ("GET", "/v1/cache/timeline"): Operation(
        tag="Inspection",
        summary="The figures of each minute or hour",
        description="Minutes are kept for three hours, hours as long as costs are.",
        query=(
            Parameter("step", "1m by default.", {"enum": ["1m", "1h"]}),
            Parameter(
                "steps", "How many, up to now; 60 by default.", {"type": "integer", "minimum": 1, "maximum": 744}
            ),
            _BY,
        ),
        answer={JSON: Timeline},
        errors=(400, 401, 403, 503),
        operator=True,
    ),
    ("GET", "/v1/requests"): Operation(
        tag="Inspection",
        summary="The requests that ended a moment ago",
        description="What became of each, and no text of it; some hundreds are kept.",
        query=(
            *(
                Parameter(name, f"Only of this {name}.")
                for name in ("model", "key", "team", "namespace", "cache", "layer", "upstream")
            ),
            Parameter("limit", "50 by default.", {"type": "integer", "minimum": 1, "maximum": 500}),
        ),
        answer={JSON: RecentRequestList},
        errors=(400, 401, 403, 503),
        operator=True,
    ),
    ("GET", "/v1/cache/semantic/decisions"): Operation(
        tag="Inspection",
        summary="The last decisions of the semantic cache",
        description="Of this host, near a stored question, with what the judge has said since; 500 are kept. Texts of"
        " questions are null unless the setting `semantic.show_questions` is on.",
        query=(
            Parameter("outcome", "Only those that ended so.", {"enum": list(OUTCOMES)}),
            Parameter("verdict", "Only those of which the judge has said this.", {"enum": list(VERDICTS)}),
            Parameter("namespace", "Only of this namespace; not with `key`."),
            Parameter("key", "Only of this virtual key, by its id or name."),
            Parameter("model", "Only stored answers of this model."),
            Parameter("limit", "50 by default.", {"type": "integer", "minimum": 1, "maximum": MAX_DECISIONS}),
            Parameter("cursor", "The `next` of the page before."),
        ),
        answer={JSON: DecisionPage},
        errors=(400, 401, 403, 404, 503),
        operator=True,
    ),
    ("GET", "/v1/cache/semantic/what-if"): Operation(
        tag="Inspection",
        summary="What the semantic cache would serve with other budgets",
        description="Hits of the same requests, and how many of them would be wrong, for other values of"
        " `semantic.delta`; of this host, since its semantic cache was started.",
        query=(
            Parameter(
                "delta",
                f"At most {MAX_DELTAS}, with commas between; 0.005, 0.01, 0.02 and the setting by default. Another one"
                " is counted of the last 10,000 requests.",
                {**TEXT, "examples": ["0.005,0.02"]},
            ),
            Parameter("step", "1h by default.", {"enum": list(STEPS)}),
            Parameter(
                "steps",
                "How many, up to now; 24 by default.",
                {"type": "integer", "minimum": 1, "maximum": MAX_STEPS},
            ),
        ),
        answer={JSON: WhatIfFigures},
        errors=(400, 401, 403, 503),
        operator=True,
    ),
    ("POST", "/v1/cache/explain"): Operation(
        tag="Inspection",
        summary="Why a request is a hit or a miss",
        description="The body is that of the request in question, and headers that matter to it are this request's. "
        "Nothing is sent upstream, counted or stored. A tenant without the admin key explains its own requests.",
        query=(
            Parameter("path", "The endpoint of the request; /v1/chat/completions by default."),
            Parameter("namespace", "Of the tenant that would send it; not with `key`."),
            Parameter("key", "The virtual key that would send it, by its id or name."),
        ),
        body={JSON: ChatCompletionRequest},
        answer={JSON: RequestExplanation},
        errors=(400, 401, 403, 404, 413, 503),
    ),
    ("POST", "/v1/cache/warm"): Operation(
        tag="Inspection",
        summary="Compute answers before anybody asks",
        description="The body is JSON Lines: requests, or lines of a batch. They are a batch of the caller's, which "
        "has a low priority and goes on after a restart; what the cache has is not computed again.",
        query=(Parameter("path", "The endpoint of all; /v1/chat/completions by default.", {"enum": list(ENDPOINTS)}),),
        body={"text/plain": TEXT},
        answer={JSON: Batch},
        errors=(400, 401, 404, 408, 413, 507),
    ),
    ("GET", "/v1/cache/entries"): Operation(
        tag="Inspection",
        summary="The entries, in pages",
        description="A tenant without the admin key sees its own. A page may have fewer entries than its limit, "
        "where a filter passes few: `next` goes on.",
        query=(
            Parameter("model", "Only of this model."),
            Parameter("namespace", "Only of this namespace; not with `key`."),
            Parameter("key", "Only of this virtual key, by its id or name."),
            Parameter("layer", "Only what this layer may serve.", {"enum": ["exact", "semantic"]}),
            Parameter("tag", "Only answers to requests with this tag in `x-keepgate-tags`."),
            Parameter("min_age", "At least so many seconds old.", _NUMBER),
            Parameter("max_age", "At most so many seconds old.", _NUMBER),
            Parameter("min_hits", "Served at least so often.", _NUMBER),
            Parameter("order", "newest by default.", {"enum": ["newest", "hits"]}),
            Parameter("text", "Only answers with this text, in any case."),
            Parameter("limit", "Entries of a page; 50 by default.", {"type": "integer", "minimum": 1, "maximum": 500}),
            Parameter("cursor", "The `next` of the page before."),
        ),
        answer={JSON: EntryPage},
        errors=(400, 401, 403, 404, 503),
    ),
    ("GET", "/v1/cache/entries/{id}"): Operation(
        tag="Inspection",
        summary="One entry, by the id in x-keepgate-entry",
        description="The tenant that owns the entry needs no admin key.",
        answer={JSON: CacheEntry},
        errors=(401, 403, 404, 503),
    ),
}
