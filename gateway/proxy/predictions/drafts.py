"""Finds the text that the answer to a request is predicted to be.

| source | text |
|---|---|
| `stale` | the older answer to the same request, which is computed anew: stale, or the client wants a new one |
| `neighbour` | the answer to the most similar question, which the semantic cache does not serve |
| `audit` | the answer to a similar question that was served, where the upstream is asked as well |

A wrong prediction changes no answer: it costs the upstream some computation, and is not sent where it mostly would be.
"""

from typing import Any, Literal, NamedTuple

from cache.entries.entry import Entry
from cache.entries.key import Key
from cache.entries.outcomes import Bypass, Hit, Outcome
from cache.errors import UnstorableAnswer
from cache.exact import ExactCache
from gateway.errors import NoUpstream
from gateway.http.sse import event_json
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.lookup import ASKING_FOR_NEW
from gateway.proxy.semantic_lookup import SemanticQuery
from gateway.routing.router import Router
from gateway.surfaces.openai import CHAT
from gateway.surfaces.registry import BY_FAMILY
from gateway.surfaces.surface import Json, StreamedForm, Surface
from gateway.upstreams.upstream import PREDICTION

Source = Literal["stale", "neighbour", "audit"]

MIN_SIMILARITY = 0.8
"""Of two questions whose answers may be alike; see docs/decisions/037-predictions.md."""
MAX_BYTES = 2**16
"""Of the text."""

# Of an answer whose text is looked for: with log-probabilities it is many times as long as its text.
_LONGEST_ANSWER = 2**20
# Of a request. A longer one would come near to the limits of servers with a prediction.
_LONGEST_REQUEST = 2**20
# Of text in a token: what is beyond the request's limit of tokens cannot be in its answer.
_BYTES_PER_TOKEN = 8
_LIMITS = ("max_completion_tokens", "max_tokens")


class Draft(NamedTuple):
    """What an answer is predicted to be."""

    text: str
    source: Source


class Drafts:
    """Finds drafts in one process' cache, for upstreams that take them."""

    def __init__(self, cache: ExactCache, router: Router) -> None:
        self._cache = cache
        self._router = router

    def are_taken(self, inference: InferenceRequest) -> bool:
        """Whether the request may have a prediction of the gateway's, and an upstream that may answer takes it."""
        if not _may_be_predicted(inference):
            return False
        try:
            candidates = self._router.candidates(inference.model)
        except NoUpstream:
            return False
        return any(upstream.settings.predictions and PREDICTION not in upstream.lacks for upstream in candidates)

    async def find(self, inference: InferenceRequest, key: Key, outcome: Outcome, query: SemanticQuery) -> Draft | None:
        """The draft of an answer that is computed after `outcome`, if there is one. Of an audit that is the served
        answer. It waits for one lookup in the tiers of the cache at most.
        """
        match outcome:
            case Hit(entry):
                source: Source = "audit" if outcome is query.hit else "stale"
                found = entry if self._cache.counts(entry) else None
            case Bypass(reason):
                source = "stale"
                found = await self._older(key) if reason in ASKING_FOR_NEW else None
            case _:
                source = "neighbour"
                found = await self._neighbour(query)
        text = None if found is None else text_of(found)
        return None if text is None else Draft(_cut(text, inference.asked.fields), source)

    async def _older(self, key: Key) -> Entry | None:
        outcome = await self._cache.lookup(key)
        return outcome.entry if isinstance(outcome, Hit) else None

    async def _neighbour(self, query: SemanticQuery) -> Entry | None:
        """The entry of the most similar question, if it is stored and the one that was found."""
        reply = query.reply
        if reply is None or not reply.entry or (reply.similarity or 0.0) < MIN_SIMILARITY:
            return None
        # As of an answer that is served: the service may hear late of a purge of the layer.
        if reply.created < self._cache.purged_before("semantic"):
            return None
        outcome = await self._cache.lookup_by_id(reply.entry)
        return outcome.entry if isinstance(outcome, Hit) and outcome.entry.created == reply.created else None


def _may_be_predicted(inference: InferenceRequest) -> bool:
    """Whether the request can have a prediction of the gateway's: a chat that is answered in text, as far as is known,
    whose client has none of its own.
    """
    fields = inference.asked.fields
    if inference.asked.path not in CHAT.paths or "prediction" in fields or len(inference.body) > _LONGEST_REQUEST:
        return False
    choice, call = fields.get("tool_choice"), fields.get("function_call")
    is_forced = choice == "required" or isinstance(choice, dict) or isinstance(call, dict)
    modalities = fields.get("modalities")
    return not is_forced and modalities in (None, ["text"])


def text_of(entry: Entry) -> str | None:
    """The text of the first choice of a stored answer in any form of API; None if it is no text."""
    form = BY_FAMILY.get(entry.family)
    if not isinstance(form, StreamedForm) or len(entry.body) > _LONGEST_ANSWER:
        return None
    try:
        answer: Json = event_json(entry.body)
        if isinstance(form, Surface):
            answer = form.chat_answer(answer)
    except (ValueError, UnstorableAnswer):
        return None
    choices = answer.get("choices")
    message: Any = choices[0].get("message") if isinstance(choices, list) and choices else None
    if not isinstance(message, dict) or any(message.get(name) for name in ("tool_calls", "function_call", "audio")):
        return None
    text = message.get("content")
    return text if isinstance(text, str) and text.strip() else None


def _cut(text: str, fields: Json) -> str:
    """As much of a text as an answer to a request with these fields can have."""
    most = MAX_BYTES
    for name in _LIMITS:
        if type(limit := fields.get(name)) is int and limit > 0:
            most = min(most, limit * _BYTES_PER_TOKEN)
    return text.encode("utf-8", "ignore")[:most].decode("utf-8", "ignore")
