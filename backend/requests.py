"""From a decoded body to sequences: every value checked, every field either honoured or refused by name."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from backend.answer_form import AnswerForm, FormReader
from backend.detokenizer import Detokenizer
from backend.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from backend.grammar import Grammars
from backend.model import ServedModel
from backend.prompt_encoder import PromptEncoder
from backend.protocol import (
    ChatRequest,
    CommonFields,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Message,
    TokenizeRequest,
)
from backend.sequence import SamplingParams, Sequence
from backend.tools import read_tools

_MOST_STOPS = 16
_LONGEST_STOP = 1000
_MOST_LOGPROBS = 20
_DEFAULT_COMPLETION_TOKENS = 16
_SEED_RANGE = 2**63
_PRIORITY_RANGE = 2**31
_MOST_EMBEDDINGS = 2048
# They are added to a row of logits at every step.
_MOST_BIASES = 1024
# One spelling of each number, and none that is too long to be one.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

_sequence_ids = itertools.count()


@dataclass(frozen=True)
class Work:
    """One request, ready for the engine: ``sequences`` are its choices in order."""

    sequences: list[Sequence]
    n: int
    """Answers to each prompt, which stand side by side in ``sequences``."""
    prompt_tokens: int
    """Tokens of all prompts; a prompt with several answers counts once."""
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool
    form: AnswerForm | None = None
    """What the answers have to look like; None: any text."""


class RequestReader:
    """Reads requests for one model.

    Args:
        most_sequences: prompts times ``n`` of one request, at most.
    """

    def __init__(self, model: ServedModel, most_sequences: int) -> None:
        self._model = model
        self.most_sequences = most_sequences
        self._longest_token = model.text.token_bytes.longest()
        text, template = model.text, model.text.chat_template
        self._encoder = None if template is None else PromptEncoder(text.tokenizer, template)
        self._grammars = Grammars(text.tokenizer, model.config.vocab_size, model.config.eos_token_ids)
        self._forms = FormReader(model, self._grammars)

    def close(self) -> None:
        """Lets go of what runs beside the engine; call it after the engine has stopped."""
        self._grammars.close()

    def has_form(self, request: ChatRequest) -> bool:
        """Whether reading the request may compile a grammar, which takes up to seconds."""
        return bool(request.tools or request.response_format)

    def takes_time(self, request: ChatRequest) -> bool:
        """Whether reading the request, beside its form, is too much work for the event loop."""
        values = [{"": message.content or ""} for message in request.messages]
        return self._encoder is not None and self._encoder.spells_control(values, None)

    def chat(self, request: ChatRequest) -> Work:
        """Checks a chat request and renders its prompt.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound: with the field's name.
        """
        self._check_model(request.model)
        _refuse_chat_fields(request)
        choice = read_tools(request.tools, request.tool_choice)
        form = self._forms.read(request, choice)
        ids = self._chat_prompt(request.messages, request.tools if choice else None)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
        top = int(_in_range("top_logprobs", request.top_logprobs, 0, 0, _MOST_LOGPROBS))
        limit_field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        room = self._room(len(ids), asked, limit_field, least=1)
        params = self._params(request, room, top if request.logprobs else None)
        return self._work(request, [ids], params, continues_text=False, form=form)

    def embedding(self, request: EmbeddingRequest) -> list[Sequence]:
        """Checks an embedding request; one sequence for each input, each of which generates nothing.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound: with the field's name.
        """
        self._check_model(request.model)
        size = self._model.config.hidden_size
        if request.dimensions not in (None, size):
            # A prefix of a vector means something only to models that were trained for it.
            raise InvalidRequest(f"dimensions: this model's embeddings have {size}, expected no other", "dimensions")
        # Before time is spent on them.
        if (count := _count(request.input)) > _MOST_EMBEDDINGS:
            raise InvalidRequest(f"input: {count} inputs, expected at most {_MOST_EMBEDDINGS}", "input")
        prompts = self._prompts(request.input, "input")
        params = SamplingParams(max_tokens=0)
        priority = _priority(request.priority)
        return [
            Sequence(
                next(_sequence_ids),
                ids,
                params,
                Detokenizer(self._model.text.token_bytes),
                0,
                priority=priority,
                pooled=True,
            )
            for ids in prompts
        ]

    def tokens(self, request: TokenizeRequest) -> list[int]:
        """Token ids of a prompt, or of the prompt that a conversation becomes.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound: with the field's name.
        """
        if request.model is not None:
            self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("prompt: expected either prompt or messages", "prompt")
        if request.messages is not None:
            if request.add_special_tokens:
                field = "add_special_tokens"
                raise InvalidRequest(f"{field}: the chat template writes them, expected false", field)
            choice = read_tools(request.tools, None)
            if choice is not None:
                self._forms.check_template()
            opens = request.add_generation_prompt is not False
            return self._chat_prompt(request.messages, request.tools if choice else None, opens)
        for field in ("tools", "add_generation_prompt"):
            if getattr(request, field) is not None:
                raise InvalidRequest(f"{field}: only with messages", field)
        ids: list[int] = self._model.text.tokenizer.encode(
            request.prompt or "", add_special_tokens=request.add_special_tokens is not False
        ).ids
        return ids

    def token_texts(self, tokens: list[int]) -> list[str]:
        """Text of each token on its own; part of a character is U+FFFD."""
        token_bytes = self._model.text.token_bytes
        return [token_bytes.shown(token).decode("utf-8", "replace") for token in tokens]

    def text(self, tokens: list[int]) -> str:
        """Text of token ids, special tokens included.

        Raises:
            InvalidRequest: an id is none of the model's.
        """
        token_bytes = self._model.text.token_bytes
        if tokens:
            self._token_ids(tokens, "tokens")
        visible = frozenset(token_bytes.special_ids.values())
        return Detokenizer(token_bytes, visible=visible).decode(tokens)

    def detokenized(self, request: DetokenizeRequest) -> str:
        """Text of a request's token ids.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound: with the field's name.
        """
        if request.model is not None:
            self._check_model(request.model)
        return self.text(request.tokens)

    def _chat_prompt(self, messages: list[Message], tools: list[Any] | None, opens: bool = True) -> list[int]:
        """Token ids of a conversation; ``opens``: up to where the assistant's answer begins."""
        if self._encoder is None:
            raise InvalidRequest(
                f"the model '{self._model.name}' has no chat template; use /v1/completions", "messages"
            )
        if not messages:
            raise InvalidRequest("messages: expected at least one message", "messages")
        template = self._model.text.chat_template
        source = "" if template is None else template.source
        plain = [_plain(message, f"messages[{index}]", source) for index, message in enumerate(messages)]
        # Far too long a conversation is refused before time is spent on it.
        length = sum(len(message["content"].encode("utf-8", "surrogatepass")) for message in plain)
        self._check_length(length // self._longest_token, "messages")
        ids = self._encoder.encode(plain, tools, opens)
        self._check_prompt(ids, "messages")
        return ids

    def completion(self, request: CompletionRequest) -> Work:
        """Checks a completion request and encodes its prompts.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound: with the field's name.
        """
        self._check_model(request.model)
        if request.suffix:
            raise InvalidRequest("suffix: this model cannot insert text; leave it out", "suffix")
        if request.best_of is not None and request.best_of != 1:
            raise InvalidRequest("best_of: not offered here, expected 1; ask for n answers instead", "best_of")
        n = self._answers_of_each(request)
        # Before time is spent on them.
        if n * (count := _count(request.prompt)) > self.most_sequences:
            raise InvalidRequest(
                f"prompt: {count} prompts times n = {n} are over the limit of {self.most_sequences} answers", "prompt"
            )
        prompts = self._prompts(request.prompt, "prompt")
        logprobs = request.logprobs
        if logprobs is not None:
            _in_range("logprobs", logprobs, 0, 0, _MOST_LOGPROBS)
        asked = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        longest = max(map(len, prompts))
        if request.max_tokens is None:
            asked = max(1, min(asked, self._model.max_context - longest))
        room = self._room(longest, asked, "max_tokens", least=0)
        echo = bool(request.echo)
        params = self._params(request, room, logprobs, prompt_logprobs=echo and logprobs is not None)
        return self._work(request, prompts, params, continues_text=True, echo=echo)

    def _work(
        self,
        request: CommonFields,
        prompts: list[list[int]],
        params: SamplingParams,
        continues_text: bool,
        echo: bool = False,
        form: AnswerForm | None = None,
    ) -> Work:
        n = self._answers_of_each(request)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        priority = _priority(request.priority)
        visible = frozenset[int]() if form is None else form.visible
        sequences = [
            Sequence(
                next(_sequence_ids),
                ids,
                params,
                Detokenizer(self._model.text.token_bytes, continues_text, visible),
                _choice_seed(seed, index),
                constraint=None if form is None else self._grammars.constraint(form.grammar),
                priority=priority,
            )
            for ids in prompts
            for index in range(n)
        ]
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequest("stream_options: only with stream true", "stream_options")
        if options is not None and options.include_obfuscation:
            raise InvalidRequest(
                "stream_options.include_obfuscation: not offered", "stream_options.include_obfuscation"
            )
        return Work(
            sequences=sequences,
            n=n,
            prompt_tokens=sum(map(len, prompts)),
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            logprobs=params.logprobs is not None,
            echo=echo,
            form=form,
        )

    def _answers_of_each(self, request: CommonFields) -> int:
        return int(_in_range("n", request.n, 1, 1, self.most_sequences))

    def _params(
        self, request: CommonFields, max_tokens: int, logprobs: int | None, prompt_logprobs: bool = False
    ) -> SamplingParams:
        if request.store:
            raise InvalidRequest("store: nothing is stored here, expected false", "store")
        if request.service_tier not in (None, "auto", "default"):
            raise InvalidRequest("service_tier: expected 'auto' or 'default'", "service_tier")
        top_k = -1 if request.top_k is None else request.top_k
        seed = request.seed
        if seed is not None and not -_SEED_RANGE <= seed < _SEED_RANGE:
            raise InvalidRequest("seed: expected an integer of 64 bits", "seed")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_in_range("temperature", request.temperature, 1.0, 0.0, 2.0),
            top_p=_in_range("top_p", request.top_p, 1.0, 0.0, 1.0),
            top_k=int(_in_range("top_k", max(top_k, 0) if top_k == -1 else top_k, 0, 0, self._model.config.vocab_size)),
            min_p=_in_range("min_p", request.min_p, 0.0, 0.0, 1.0),
            presence_penalty=_in_range("presence_penalty", request.presence_penalty, 0.0, -2.0, 2.0),
            frequency_penalty=_in_range("frequency_penalty", request.frequency_penalty, 0.0, -2.0, 2.0),
            repetition_penalty=_in_range("repetition_penalty", request.repetition_penalty, 1.0, 0.01, 100.0),
            logit_bias=self._logit_bias(request.logit_bias),
            seed=seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop=_stops(request.stop),
            ignore_eos=bool(request.ignore_eos),
        )

    def _logit_bias(self, values: dict[str, float] | None) -> dict[int, float]:
        values = values or {}
        if len(values) > _MOST_BIASES:
            raise InvalidRequest(f"logit_bias: {len(values)} tokens, expected at most {_MOST_BIASES}", "logit_bias")
        biases: dict[int, float] = {}
        for key, bias in values.items():
            if not _TOKEN_ID.fullmatch(key) or int(key) >= self._model.config.vocab_size:
                raise InvalidRequest(
                    f"logit_bias: keys must be token ids from 0 to {self._model.config.vocab_size - 1}", "logit_bias"
                )
            biases[int(key)] = _in_range("logit_bias", bias, 0.0, -100.0, 100.0)
        return biases

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            raise ModelNotFound(f"no such model here; this server has '{self._model.name}'", "model")

    def _prompts(self, prompt: str | list[str | int | list[int]], field: str) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self._encode(prompt, field)]
        if not prompt:
            raise InvalidRequest(f"{field}: the list is empty", field)
        if all(isinstance(item, int) for item in prompt):
            return [self._token_ids([item for item in prompt if isinstance(item, int)], field)]
        encoded = []
        for index, item in enumerate(prompt):
            where = f"{field}[{index}]"
            if isinstance(item, int) or not isinstance(item, type(prompt[0])):
                raise InvalidRequest(f"{where}: texts, token ids and lists of token ids cannot be mixed", where)
            if isinstance(item, str):
                encoded.append(self._encode(item, where))
            else:
                encoded.append(self._token_ids(item, where))
        return encoded

    def _token_ids(self, ids: list[int], where: str) -> list[int]:
        if not ids:
            raise InvalidRequest(f"{where}: the list of token ids is empty", where)
        vocab_size = self._model.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise InvalidRequest(f"{where}: token ids go from 0 to {vocab_size - 1}", where)
        self._check_length(len(ids), where)
        return ids

    def _encode(self, text: str, where: str) -> list[int]:
        # Far too long a text is refused before time is spent on it.
        self._check_length(len(text.encode("utf-8", "surrogatepass")) // self._longest_token, where)
        ids: list[int] = self._model.text.tokenizer.encode(text).ids
        self._check_prompt(ids, where)
        return ids

    def _check_prompt(self, ids: list[int], where: str) -> None:
        if not ids:
            raise InvalidRequest(f"{where}: the prompt is empty", where)
        self._check_length(len(ids), where)

    def _check_length(self, tokens: int, where: str) -> None:
        if tokens >= self._model.max_context:
            raise ContextLengthExceeded(
                f"{where}: the prompt has {tokens} tokens or more, the context is {self._model.max_context} "
                "tokens for prompt and answer together; shorten the prompt",
                where,
            )

    def _room(self, prompt_tokens: int, asked: int | None, field: str, least: int) -> int:
        """Tokens that the answer may have."""
        room = self._model.max_context - prompt_tokens
        if asked is None:
            return room
        if asked < least:
            raise InvalidRequest(f"{field}: out of range, expected at least {least}", field)
        if asked > room:
            raise ContextLengthExceeded(
                f"{field}: with {prompt_tokens} tokens of prompt the answer may have {room} tokens, for the context "
                f"is {self._model.max_context}; ask for no more",
                field,
            )
        return asked


def _count(prompt: str | Many[str | int | list[int]]) -> int:
    """How many prompts a text, texts, token ids, or lists of token ids are."""
    return 1 if isinstance(prompt, str) or isinstance(next(iter(prompt), None), int) else len(prompt)


def _refuse_chat_fields(request: ChatRequest) -> None:
    """Refuses what would change the answer and is not done; says nothing where a field asks for nothing."""
    refusals = (
        ("functions", bool(request.functions), "not offered, for it has given way to tools"),
        ("function_call", request.function_call not in (None, "none", "auto"), "has given way to tool_choice"),
        ("modalities", request.modalities not in (None, ["text"]), 'expected ["text"]'),
    )
    for field, refused, expected in refusals:
        if refused:
            raise InvalidRequest(f"{field}: {expected}", field)


def _plain(message: Message, where: str, template: str) -> dict[str, Any]:
    """A message as templates see it: content is one text, and 'developer' is what newer clients call 'system'."""
    role = "system" if message.role == "developer" else message.role
    for field in ("tool_calls", "function_call", "audio", "refusal", "annotations"):
        if getattr(message, field) and not (field == "tool_calls" and field in template):
            raise InvalidRequest(f"{where}.{field}: this model's prompt has no place for it", f"{where}.{field}")
    if message.tool_calls and role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only the assistant calls tools", f"{where}.tool_calls")
    if role == "tool" and not message.tool_call_id:
        at = f"{where}.tool_call_id"
        raise InvalidRequest(f"{at}: expected the id of the call that this is the result of", at)
    if role != "tool" and message.tool_call_id is not None:
        at = f"{where}.tool_call_id"
        raise InvalidRequest(f"{at}: only in messages whose role is 'tool'", at)
    plain: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        if ".name" not in template and "['name']" not in template:
            raise InvalidRequest(f"{where}.name: this model's prompt has no place for it", f"{where}.name")
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call as templates see it: the arguments are an object, not its text."""
    function = call.get("function")
    if call.get("type") not in (None, "function"):
        raise InvalidRequest(f"{where}.type: expected 'function'", f"{where}.type")
    if not isinstance(call.get("id"), str | None):
        raise InvalidRequest(f"{where}.id: expected a string", f"{where}.id")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function: expected an object with 'name' and 'arguments'", f"{where}.function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{where}.function.name: expected a name", f"{where}.function.name")
    arguments = function.get("arguments")
    try:
        # Strict: neither NaN nor half a surrogate pair, which no tokenizer takes. Nothing is what some clients make
        # of a call without arguments.
        parsed = msgspec.json.decode(arguments or "{}") if isinstance(arguments, str) else arguments
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        at = f"{where}.function.arguments"
        raise InvalidRequest(f"{at}: expected the text of a JSON object", at)
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": parsed}}


def _content(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"{where}.content: expected a text or a list of text parts", f"{where}.content")
        return ""
    texts = []
    for index, part in enumerate(content):
        at = f"{where}.content[{index}]"
        if part.get("type") != "text":
            raise InvalidRequest(f"{at}.type: only parts of type 'text' are supported", f"{at}.type")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{at}.text: expected a string", f"{at}.text")
        if unknown := [name for name, value in part.items() if name not in ("type", "text") and value is not None]:
            raise InvalidRequest(f"{at}: unknown field in a text part", f"{at}.{unknown[0][:64]}")
        texts.append(text)
    return "\n".join(texts)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops: Many[str] = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(stops) > _MOST_STOPS:
        raise InvalidRequest(f"stop: {len(stops)} strings, expected at most {_MOST_STOPS}", "stop")
    if not all(stops):
        raise InvalidRequest("stop: an empty string would stop everything; leave it out", "stop")
    if (longest := max(map(len, stops), default=0)) > _LONGEST_STOP:
        raise InvalidRequest(f"stop: a string of {longest} characters, expected at most {_LONGEST_STOP}", "stop")
    return tuple(stops)


def _in_range(field: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(f"{field}: out of range, expected {low} to {high}", field)
    return value


def _priority(value: int | None) -> int:
    if value is not None and not -_PRIORITY_RANGE <= value < _PRIORITY_RANGE:
        raise InvalidRequest("priority: expected an integer of 32 bits; smaller ones go first", "priority")
    return value or 0


def _choice_seed(seed: int, index: int) -> int:
    """The answers to one request draw differently, each of them reproducibly."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{index}".encode())
