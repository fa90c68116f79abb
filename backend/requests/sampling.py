"""The fields of a request that control sampling and stopping."""

from __future__ import annotations

import re
from collections.abc import Sequence

from backend.engine.sequence import SamplingParams
from backend.errors import InvalidRequest
from backend.models.generation_config import SamplingDefaults
from backend.protocol import CommonFields

MAX_LOGPROBS = 20
"""Limit of alternatives reported for a token."""
_MAX_STOPS = 16
_MAX_STOP_LENGTH = 1000
_SEED_RANGE = 2**63
_MAX_MIN_TOKENS = 2**31
# Limited because they are added to the logits at every step.
_MAX_BIASES = 1024
# One spelling for each id; the length is limited before conversion to int.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def sampling_params(
    request: CommonFields,
    defaults: SamplingDefaults,
    vocab_size: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters of all choices of a request.

    Args:
        defaults: the model's, for fields that the request leaves out.
        vocab_size: token ids are below it.
        max_tokens: limit of the answer, already checked against the context.
        logprobs: alternatives to report at each token; each endpoint has its own field for them.
        prompt_logprobs: the same for the prompt; None: the request's ``prompt_logprobs``.

    Raises:
        InvalidRequest: names the field.
    """
    seed = request.seed
    if seed is not None and not -_SEED_RANGE <= seed < _SEED_RANGE:
        raise InvalidRequest("seed: expected a 64-bit integer", "seed")
    if prompt_logprobs is None and request.prompt_logprobs is not None:
        prompt_logprobs = int(in_range("prompt_logprobs", request.prompt_logprobs, 0, 0, MAX_LOGPROBS))
    min_tokens = int(in_range("min_tokens", request.min_tokens, 0, 0, _MAX_MIN_TOKENS))
    top_k = 0 if request.top_k == -1 else request.top_k  # clients use both for: no limit
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=in_range("temperature", request.temperature, defaults.temperature, 0.0, 2.0),
        top_p=in_range("top_p", request.top_p, defaults.top_p, 0.0, 1.0),
        top_k=int(in_range("top_k", top_k, min(defaults.top_k, vocab_size), 0, vocab_size)),
        min_p=in_range("min_p", request.min_p, defaults.min_p, 0.0, 1.0),
        presence_penalty=in_range("presence_penalty", request.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=in_range("frequency_penalty", request.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=in_range(
            "repetition_penalty", request.repetition_penalty, defaults.repetition_penalty, 0.01, 100.0
        ),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        seed=seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=_stops(request.stop),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], vocab_size),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min(min_tokens, max_tokens),
    )


def in_range(field: str, value: float | None, default: float, low: float, high: float) -> float:
    """The value of a field, or its default if absent.

    Raises:
        InvalidRequest: it is not from ``low`` to ``high``.
    """
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(f"{field}: out of range, expected {low} to {high}", field)
    return value


def _logit_bias(values: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(values) > _MAX_BIASES:
        raise InvalidRequest(f"logit_bias: {len(values)} tokens, expected at most {_MAX_BIASES}", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in values.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: {key[:40]!r} is no token id; expected one from 0 to {vocab_size - 1}", "logit_bias"
            )
        biases[int(key)] = in_range("logit_bias", bias, 0.0, -100.0, 100.0)
    return biases


def _stop_token_ids(ids: list[int], vocab_size: int) -> frozenset[int]:
    if len(ids) > _MAX_STOPS:
        raise InvalidRequest(f"stop_token_ids: {len(ids)} tokens, expected at most {_MAX_STOPS}", "stop_token_ids")
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise InvalidRequest(f"stop_token_ids: token ids go from 0 to {vocab_size - 1}", "stop_token_ids")
    return frozenset(ids)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops: Sequence[str] = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(stops) > _MAX_STOPS:
        raise InvalidRequest(f"stop: {len(stops)} strings, expected at most {_MAX_STOPS}", "stop")
    if not all(stops):
        raise InvalidRequest("stop: an empty string would stop everything; leave it out", "stop")
    if (longest := max(map(len, stops), default=0)) > _MAX_STOP_LENGTH:
        raise InvalidRequest(f"stop: a string of {longest} characters, expected at most {_MAX_STOP_LENGTH}", "stop")
    return tuple(stops)
