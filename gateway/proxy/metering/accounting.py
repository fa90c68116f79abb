"""What an answered request cost and saved, in metrics and in the ledger."""

from collections.abc import Sequence

import msgspec

from cache.entries.entry import Entry, Family
from cache.index.entry_index import EntryIndex
from gateway import metrics
from gateway.costs.cost import estimated_tokens, similar_cost
from gateway.costs.ledger import Ledger
from gateway.costs.machine import MachineShare
from gateway.costs.pricing import Charge, Pricing
from gateway.costs.usage import TokenUsage
from gateway.proxy.flight import Flight
from gateway.proxy.inference_request import InferenceRequest
from gateway.proxy.metering.estimates import prompt_tokens
from gateway.surfaces.whole import WholeEndpoint
from gateway.tenants.caller import Caller
from gateway.upstreams.upstream import Upstream


class Accounting:
    """Counts answers. Without `pricing` nothing has a price."""

    def __init__(self, ledger: Ledger, pricing: Pricing | None, index: EntryIndex) -> None:
        self._ledger = ledger
        self._index = index
        self._pricing = pricing

    def hit_from_memory(self, family: Family, entry: Entry, caller: Caller) -> None:
        """An exact hit of the fast path, which asks no tier."""
        metrics.hits_from_memory.inc()
        metrics.count_hit(family, entry, "exact")
        self._record_hit(entry, "exact", caller, None)

    def exact_hit(self, inference: InferenceRequest, entry: Entry) -> None:
        metrics.count_hit(inference.family, entry, "exact")
        self._record_hit(entry, "exact", inference.caller, None)

    def similar_hit(self, inference: InferenceRequest, entry: Entry, layer: str) -> float | None:
        """The answer to a similar question; returns the dollars that it saved, None where they are not known."""
        saving = entry.repeat_cost
        if saving is not None:
            asked = estimated_tokens(len(inference.body))
            saving = similar_cost(saving, entry.prompt_tokens, entry.completion_tokens, asked)
        metrics.count_hit(inference.family, entry, layer)
        self._record_hit(entry, layer, inference.caller, saving)
        return saving

    def computed(self, inference: InferenceRequest, flight: Flight) -> Charge | None:
        """What the upstream's answer cost who asked for it; None if there was no answer."""
        upstream = flight.source
        if self._pricing is None or upstream is None or flight.status != 200:
            return None
        usage, estimated = _usage(inference, flight)
        if upstream.machine is not None and usage is not None:
            upstream.machine.count(usage.prompt + usage.completion)
        model = flight.model or inference.model
        charge = self._pricing.charge(upstream.name, upstream.settings, model, usage, flight.share, estimated=estimated)
        self._ledger.record(charge, *_names(inference.caller))
        return charge

    def used(self, inference: InferenceRequest, flight: Flight) -> tuple[int, float]:
        """Tokens and dollars that the upstream's answer counts for limits, once its charge is known."""
        if flight.status != 200:
            return 0, 0.0
        usage, _ = _usage(inference, flight)
        cost = None if flight.charge is None else flight.charge.cost
        return 0 if usage is None else usage.prompt + usage.completion, cost or 0.0

    def joined(self, inference: InferenceRequest, flight: Flight) -> None:
        """A request that shared the upstream call of another one, once that has ended."""
        if flight.charge is not None:
            self._ledger.record(flight.charge.joined(), *_names(inference.caller))

    def embedded_hit(self, caller: Caller, entries: Sequence[Entry]) -> None:
        """A request for embeddings, all of which the cache had: one request in the ledger, by its first input."""
        for entry in entries:
            self._index.hit(entry.id)
        savings = [entry.repeat_cost for entry in entries]
        saving = None if None in savings else sum(saving for saving in savings if saving is not None)
        if self._pricing is not None:
            tokens = sum(entry.prompt_tokens for entry in entries)
            whole = msgspec.structs.replace(entries[0], prompt_tokens=tokens)
            self._ledger.hit(whole, "exact", *_names(caller), saving)

    def embedded(
        self, caller: Caller, upstream: Upstream, share: MachineShare | None, model: str, tokens: int
    ) -> Charge | None:
        """What a call for embeddings cost."""
        if self._pricing is None:
            return None
        if upstream.machine is not None:
            upstream.machine.count(tokens)
        charge = self._pricing.charge(upstream.name, upstream.settings, model, TokenUsage(tokens), share)
        self._ledger.record(charge, *_names(caller))
        return charge

    def estimate(self, inference: InferenceRequest, prompt_tokens: int, output_tokens: int) -> float:
        """Dollars that an answer may cost; 0 where that is not known."""
        return 0.0 if self._pricing is None else self._pricing.estimate(inference.model, prompt_tokens, output_tokens)

    def _record_hit(self, entry: Entry, layer: str, caller: Caller, saving: float | None) -> None:
        self._index.hit(entry.id)
        if self._pricing is not None:
            self._ledger.hit(entry, layer, *_names(caller), saving)


def _usage(inference: InferenceRequest, flight: Flight) -> tuple[TokenUsage | None, bool]:
    """The tokens of an answer, and whether they are estimated.

    That is where the upstream has not said them, as of an answer that was broken off: from the prompt and from what
    came, for who leaves early has used them all the same. None for a form without tokens.
    """
    if flight.recording is not None and flight.recording.billed is not None:
        return flight.recording.billed, False
    if isinstance(flight.form, WholeEndpoint):
        return None, False
    return TokenUsage(prompt_tokens(inference.body, inference.asked.fields), flight.output_tokens), True


def _names(caller: Caller) -> tuple[str, str]:
    key = caller.key
    return ("", "") if key is None else (key.id, key.team)
