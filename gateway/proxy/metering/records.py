"""Fills in the record of a request: who asked for what, and how it was answered."""

import time

from cache.entries.entry import Entry
from gateway.proxy.flight import Flight
from gateway.proxy.inference_request import InferenceRequest
from gateway.telemetry.record import RequestRecord
from gateway.tenants.caller import Caller


def describe_caller(record: RequestRecord, caller: Caller) -> None:
    record.namespace = caller.namespace
    if caller.key is not None:
        record.key, record.team = caller.key.id, caller.key.team


def describe_request(record: RequestRecord, inference: InferenceRequest) -> None:
    record.family, record.model, record.stream = inference.family, inference.model, inference.stream
    describe_caller(record, inference.caller)


def describe_hit(record: RequestRecord, entry: Entry, family: str, layer: str, saving: float | None) -> None:
    """An answer from the cache, which is sent now."""
    record.family, record.model, record.upstream = family, entry.model, entry.upstream
    record.cache, record.layer, record.entry = "hit", layer, entry.id
    record.prompt_tokens, record.completion_tokens = entry.prompt_tokens, entry.completion_tokens
    record.cost, record.saving, record.saved_seconds = 0.0, saving, entry.seconds
    record.first_byte_at = time.monotonic()


def describe_flight(record: RequestRecord, flight: Flight, joined: bool) -> None:
    """An answer that an upstream has computed, once it has ended.

    Who began it pays for it: where its client leaves before that, the record is told of when the answer has ended.
    """
    if flight.task is not None and not flight.finished and not joined:
        record.ends_with = flight.task
        flight.task.add_done_callback(lambda _: _describe_flight(record, flight, joined))
    else:
        _describe_flight(record, flight, joined)


def _describe_flight(record: RequestRecord, flight: Flight, joined: bool) -> None:
    record.upstream = flight.upstream
    if flight.recording is None and record.cache != "hit":  # not a stale one in place of an error
        record.entry = ""
    if joined:
        record.layer, record.saved_seconds = "flight", flight.seconds
    elif flight.prediction:
        record.prediction = flight.prediction
        record.accepted_prediction_tokens, record.rejected_prediction_tokens = flight.prediction_tokens
    if flight.error is not None and not flight.abandoned:  # else nobody was told of it
        record.error = flight.error.label
    if flight.charge is not None:
        charge = flight.charge.joined() if joined else flight.charge
        record.prompt_tokens, record.cached_tokens = charge.prompt_tokens, charge.cached_tokens
        record.completion_tokens = charge.completion_tokens
        record.cost, record.saving, record.estimated = charge.cost, charge.saving, charge.estimated
