"""What clients ask about models, embeddings, and requests that only load a model."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ollama import EmbedResponse, GenerateResponse, ListResponse, ProcessResponse, ShowResponse

from gateway.errors import InvalidRequest, UpstreamDisconnected
from gateway.surfaces.ollama.embeddings import embed_answer, embed_request
from gateway.surfaces.ollama.loading import is_load, load_answer
from gateway.surfaces.ollama.models import known_as, ps, show, tags, version
from gateway.surfaces.surface import ChatRequest, Json
from tests.gateway.surfaces.ollama.examples import quick, texts, values

MODEL: Json = {"id": "Qwen/Qwen3-8B", "object": "model", "created": 1_700_000_000, "owned_by": "vllm"}
INFO: Json = {
    "id": "SmolLM2-135M-Instruct",
    "architecture": "llama",
    "weights_precision": "float32",
    "quantization": None,
    "max_context": 8192,
    "num_layers": 30,
    "num_kv_heads": 3,
    "hidden_size": 576,
    "vocab_size": 49152,
    "tools": "generic",
    "reasoning": False,
}


def test_models_are_listed_with_all_that_clients_read() -> None:
    """By the name under which a client asks for them; the digest is that of the name, always."""
    entry, other = tags([MODEL, {"id": "m"}])["models"]
    listed = ListResponse.model_validate(tags([MODEL])).models[0]

    assert (entry["name"], listed.model, listed.size) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", 0)
    assert listed.modified_at is not None
    assert listed.modified_at.timestamp() == 1_700_000_000
    assert len(entry["digest"]) == 64
    assert entry["digest"] == tags([MODEL])["models"][0]["digest"] != other["digest"]
    assert entry["details"].keys() == {
        *("parent_model", "format", "family", "families", "parameter_size", "quantization_level")
    }


def test_every_model_is_loaded() -> None:
    """And stays so; vLLM says how long its context is."""
    running = ProcessResponse.model_validate(ps([{**MODEL, "max_model_len": 40960}])).models[0]
    assert (running.name, running.size_vram, running.context_length) == ("Qwen/Qwen3-8B", 0, 40960)
    assert running.expires_at is not None
    assert running.expires_at.year == 2300


def test_an_unknown_model_is_shown() -> None:
    """It may be able to call tools: clients do not offer any to a model that says it cannot."""
    answer = show({**MODEL, "max_model_len": 40960})
    shown = ShowResponse.model_validate(answer)
    assert shown.capabilities == ["completion", "tools"]
    assert answer["model_info"]["unknown.context_length"] == 40960
    assert answer["model_info"]["general.architecture"] == "unknown"


@pytest.mark.parametrize(
    ("change", "capabilities", "level"),
    [
        ({}, ["completion", "tools"], "float32"),
        ({"tools": None, "reasoning": True}, ["completion", "thinking"], "float32"),
        ({"quantization": {"schemes": {"q4_0": 210, "q8_0": 1}}}, ["completion", "tools"], "q4_0"),
    ],
    ids=str,
)
def test_the_engine_s_own_model_is_shown(change: Json, capabilities: list[str], level: str) -> None:
    """With its shape and what it can do."""
    shown = ShowResponse.model_validate(show(MODEL, {**INFO, **change}))
    assert shown.capabilities == capabilities
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 8192
    assert shown.modelinfo["llama.block_count"] == 30
    assert shown.details is not None
    assert (shown.details.family, shown.details.families) == ("llama", ["llama"])
    assert shown.details.quantization_level == level


@quick
@given(texts, st.dictionaries(st.sampled_from([*INFO, "created", "max_model_len"]), values))
def test_anything_that_an_upstream_says_of_a_model_is_shown(name: str, said: Json) -> None:
    """Wrong types count as unknown."""
    model = {**said, "id": name}
    ListResponse.model_validate(tags([model]))
    ProcessResponse.model_validate(ps([model]))
    ShowResponse.model_validate(show(model, said))


def test_the_version_is_one_that_clients_accept() -> None:
    """They compare its numbers."""
    assert [int(number) for number in version()["version"].split(".")] >= [0, 6, 4]


@pytest.mark.parametrize(
    ("name", "listed", "known"),
    [
        ("m:latest", ["m"], "m"),
        ("m:latest", ["m", "m:latest"], "m:latest"),
        ("m:latest", ["other"], "m:latest"),
        ("m:8b", ["m"], "m:8b"),
        ("m", ["m:latest"], "m"),
    ],
)
def test_a_client_may_add_the_tag_latest(name: str, listed: list[str], known: str) -> None:
    """It means the model without a tag where there is none with it."""
    assert known_as(name, listed) == known


@pytest.mark.parametrize(
    ("given_input", "path"), [("a", "/api/embed"), (["a", "b"], "/api/embed"), ("a", "/api/embeddings")]
)
def test_an_embed_request_is_one_for_embeddings(given_input: Any, path: str) -> None:
    """Time and options of the runtime have no meaning for an upstream; dimensions do."""
    name = "input" if path == "/api/embed" else "prompt"
    fields = {"model": "m", name: given_input, "keep_alive": "5m", "dimensions": 8, "truncate": True, "options": {}}
    asked = {"model": "m", "input": given_input, "dimensions": 8, "truncate": True, "options": {}}
    assert embed_request(path, fields) == ChatRequest(asked, path="/v1/embeddings", ignored=("truncate", "options"))
    strange = embed_request(path, {"model": "m", name: given_input, "encoding_format": "base64"})
    assert strange.ignored == ("ollama.encoding_format",)


@pytest.mark.parametrize("given_input", [7, ["a", 7], {"a": 1}, [["a"]]], ids=str)
@pytest.mark.parametrize(("path", "name"), [("/api/embed", "input"), ("/api/embeddings", "prompt")])
def test_what_is_no_text_to_embed_is_refused(path: str, name: str, given_input: Any) -> None:
    """By the name of the field."""
    with pytest.raises(InvalidRequest) as refused:
        embed_request(path, {"model": "m", name: given_input})
    assert refused.value.param == name


def test_embeddings_are_in_the_order_of_their_inputs() -> None:
    """And there are no tokens where an upstream counts none."""
    data = [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]
    answer = {"model": "m", "data": data, "usage": {"prompt_tokens": 3, "total_tokens": 3}}
    embedded = embed_answer("/api/embed", answer)
    assert EmbedResponse.model_validate(embedded).embeddings == [[1.0], [2.0]]
    assert (embedded["model"], embedded["prompt_eval_count"]) == ("m", 3)
    assert embed_answer("/api/embed", {"data": data})["prompt_eval_count"] == 0
    assert embed_answer("/api/embeddings", answer) == {"embedding": [1.0]}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        ["x"],
        [{"index": 0}],
        [{"index": 1, "embedding": [1]}],
        [{"index": [0], "embedding": [1]}],
        [{"index": 0, "embedding": "AAAA"}],
    ],
    ids=str,
)
def test_a_list_that_is_none_of_embeddings_is_an_error_of_the_upstream(data: Any) -> None:
    """Such as one with a gap, or in base64, which was not asked for."""
    with pytest.raises(UpstreamDisconnected):
        embed_answer("/api/embed", {"data": data})


@pytest.mark.parametrize(
    ("path", "empty", "whole"),
    [
        ("/api/chat", [{}, {"messages": []}], {"messages": [{"role": "user"}]}),
        ("/api/generate", [{}, {"prompt": ""}], {"prompt": "a"}),
        ("/api/embed", [{}, {"input": ""}, {"input": []}], {"input": ["a"]}),
        ("/api/embeddings", [{}, {"prompt": ""}], {"prompt": "a"}),
    ],
)
def test_a_request_without_a_question_loads_the_model(path: str, empty: list[Json], whole: Json) -> None:
    """Whatever else is in it."""
    assert all(is_load(path, {"model": "m", "stream": True, **fields}) for fields in empty)
    assert not is_load(path, {"model": "m", **whole})


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), ("5m", "load"), (-1, "load"), ("10s", "load"), (0, "unload"), ("0", "unload"), ("0s", "unload")],
)
def test_a_loaded_model_says_so(keep_alive: Any, reason: str) -> None:
    """With a time to live of nothing it says that it is unloaded."""
    fields = {"model": "m", "keep_alive": keep_alive}
    expected = {"model": "m", "created_at": "2023-11-14T22:13:20.5Z", "done": True, "done_reason": reason}
    assert load_answer("/api/generate", fields, 1_700_000_000.5) == {**expected, "response": ""}
    chat = load_answer("/api/chat", fields, 1_700_000_000.5)
    assert chat == {**expected, "message": {"role": "assistant", "content": ""}}
    assert GenerateResponse.model_validate(load_answer("/api/generate", fields, 0)).done
    assert load_answer("/api/embed", fields, 0) == {"model": "m", "embeddings": []}
    assert load_answer("/api/embeddings", fields, 0) == {"embedding": []}
