"""Strategies for answers: chat completions as servers send them, and Ollama's own."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

Json = dict[str, Any]

quick = settings(max_examples=60, deadline=None)

# What JSON can say: no lone surrogates, and integers that every parser reads alike.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
long_texts = texts | st.text(st.characters(exclude_categories=["Cs"]), min_size=60, max_size=300)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
objects = st.dictionaries(texts, values, max_size=3)
counts = st.integers(0, 2**31)
_STANDARD = frozenset(
    {
        *("id", "object", "created", "model", "choices", "usage", "error", "index", "message", "text", "obfuscation"),
        *("finish_reason", "logprobs", "role", "content", "thinking", "tool_calls", "reasoning_content", "reasoning"),
        *("created_at", "done", "done_reason", "response", "keepgate", "ollama", "delta", "name", "type"),
    }
)
unknown = st.dictionaries(texts.filter(lambda name: name not in _STANDARD), values, max_size=2)


def exact(value: Any) -> Any:
    """The value so that 1, 1.0 and true differ."""
    if isinstance(value, dict):
        return {name: exact(item) for name, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, list) else (type(value), value)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional=fields)


def merged(*parts: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return st.tuples(*parts).map(lambda dicts: {name: value for part in dicts for name, value in part.items()})


tokens = merged(
    st.fixed_dictionaries({"token": texts, "logprob": st.floats(-50, 0)}),
    optional(
        bytes=st.none() | st.lists(st.integers(0, 255), max_size=4),
        top_logprobs=st.lists(st.fixed_dictionaries({"token": texts, "logprob": st.floats(-50, 0)}), max_size=2),
    ),
)
# As models write them: with spaces, nothing at all, or not JSON.
arguments = st.sampled_from(["", '{"city": "Paris"}', '{"a":1.0,"b":[1,{"c":null}]}', '{"cut', "[1]", "7"]) | texts
chat_calls = st.lists(
    merged(
        st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": texts, "arguments": arguments})}),
        optional(id=texts, type=st.just("function"), extra_content=values),
    ),
    max_size=3,
)
chat_messages = merged(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | long_texts}),
    optional(
        refusal=st.none() | texts,
        reasoning_content=st.none() | long_texts,
        reasoning=st.none() | long_texts,
        tool_calls=st.none() | chat_calls,
    ),
    unknown,
)
reasons = st.sampled_from(["stop", "length", "tool_calls", "function_call", "content_filter", None])
usages = merged(
    st.fixed_dictionaries({"prompt_tokens": counts, "completion_tokens": counts, "total_tokens": counts}),
    optional(prompt_tokens_details=st.none() | st.fixed_dictionaries({"cached_tokens": counts})),
    unknown,
)


@st.composite
def _choices(draw: st.DrawFn, index: int, is_chat: bool) -> Json:
    said: Json = {"message": draw(chat_messages)} if is_chat else {"text": draw(long_texts)}
    logprobs = st.fixed_dictionaries(
        {"content": st.none() | st.lists(tokens, max_size=4)}, optional={"refusal": values}
    )
    rest = optional(logprobs=st.none() | (logprobs if is_chat else objects), stop_reason=values)
    return {"index": index, **said, "finish_reason": draw(reasons), **draw(rest), **draw(unknown)}


@st.composite
def chat_answers(draw: st.DrawFn, is_chat: bool = True) -> Json:
    """A chat completion, or a completion, with fields that no specification names."""
    known: Json = {
        "id": draw(texts),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": draw(st.integers(0, 2**33) | st.floats(0, 2**33)),
        "model": draw(texts),
        "choices": [draw(_choices(index, is_chat)) for index in range(draw(st.integers(1, 2)))],
    }
    rest = optional(usage=st.none() | usages, system_fingerprint=st.none() | texts)
    return {**known, **draw(rest), **draw(unknown)}


own_calls = st.lists(
    merged(
        st.fixed_dictionaries(
            {
                "function": merged(
                    st.fixed_dictionaries({"name": texts, "arguments": objects}), optional(index=st.integers(0, 3))
                )
            }
        ),
        optional(id=texts),
        unknown,
    ),
    max_size=3,
)
times = st.sampled_from(
    ["2023-08-04T08:52:19.385406455-07:00", "2024-09-12T21:17:29.110811Z", "2025-01-01T00:00:00Z", "today"]
)
_statistics = optional(
    done_reason=st.sampled_from(["stop", "length", "load", "unload"]),
    total_duration=counts,
    load_duration=counts,
    prompt_eval_count=counts,
    prompt_eval_duration=counts,
    eval_count=counts,
    eval_duration=counts,
    logprobs=st.lists(tokens, max_size=4),
)


def own_answers(message: bool) -> st.SearchStrategy[Json]:
    """An answer of /api/chat (with a message) or of /api/generate, old and new."""
    rest = (st.fixed_dictionaries({"model": texts, "created_at": times, "done": st.just(True)}), _statistics, unknown)
    said = optional(thinking=long_texts, tool_calls=own_calls)
    if not message:
        context = optional(context=st.lists(st.integers(0, 9), max_size=5))
        return merged(st.fixed_dictionaries({"response": long_texts}), said, *rest, context)
    messages = merged(
        st.fixed_dictionaries({"role": st.just("assistant"), "content": long_texts}),
        said,
        optional(images=st.none() | st.lists(texts, max_size=2)),
        unknown,
    )
    return merged(st.fixed_dictionaries({"message": messages}), *rest)
