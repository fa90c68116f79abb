"""Embeddings over HTTP: the mean of the last hidden states, as unit vectors."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file

from backend.model import ServedModel
from backend.model_loader.source import ModelSource
from tests.backend.api.test_server import all_free, until
from tests.backend.conftest import EMBEDDINGS, MODEL, Served, StartServer

LONG = "The library keeps old maps of the coast. " * 40


def vectors(answer: dict[str, Any]) -> npt.NDArray[np.float32]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return np.array([entry["embedding"] for entry in answer["data"]], dtype=np.float32)


def reference_model(source: ModelSource) -> Any:
    """The decoder of transformers, in float32, without its head."""
    config = transformers.AutoConfig.from_pretrained(source.directory)
    make: Any = transformers.AutoModelForCausalLM
    whole = make.from_config(config, dtype=torch.float32)
    state: dict[str, torch.Tensor] = {}
    for path in source.directory.glob("*.safetensors"):
        state |= load_file(path)
    missing, unexpected = whole.load_state_dict(state, strict=False)
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    return whole.model.eval()


async def test_embeddings_are_those_of_transformers(server: Served, model: ServedModel, source: ModelSource) -> None:
    """Embeddings are the unit vectors of transformers' hidden states, for a short text and one of several chunks."""
    texts = ["A cat sleeps.", LONG]
    answer = await server.post(EMBEDDINGS, input=texts)
    found = vectors(answer)
    assert found.shape == (2, model.config.hidden_size)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    reference = reference_model(source)
    tokens = 0
    for text, vector in zip(texts, found, strict=True):
        ids = model.tokenizer.fast.encode(text).ids
        tokens += len(ids)
        with torch.inference_mode():
            mean = reference(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
        expected = (mean / mean.norm()).numpy()
        assert float(vector @ expected) > 0.999
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (answer["object"], answer["model"], answer["data"][0]["object"]) == ("list", MODEL, "embedding")


async def test_every_kind_of_input_and_both_encodings(server: Served, model: ServedModel) -> None:
    """A text, its token ids and lists of either give the same vector; base64 is its little-endian float32 bytes."""
    ids = model.tokenizer.fast.encode("A dog barks.").ids
    plain = vectors(await server.post(EMBEDDINGS, input="A dog barks."))
    for given in (["A dog barks."], ids, [ids]):
        answer = await server.post(EMBEDDINGS, input=given, dimensions=model.config.hidden_size)
        np.testing.assert_array_equal(vectors(answer), plain)
    packed = await server.post(EMBEDDINGS, input="A dog barks.", encoding_format="base64")
    raw = base64.b64decode(packed["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), plain[0])


async def test_similar_texts_have_similar_embeddings(server: Served) -> None:
    """Similar texts have similar embeddings, and stay the same beside other requests and after a chat."""
    texts = ["The cat sleeps on the sofa.", "A cat is sleeping on a couch.", "Stock prices fell sharply on Monday."]
    cat, couch, stocks = vectors(await server.post(EMBEDDINGS, input=texts))
    assert cat @ couch > cat @ stocks
    await server.text(texts[0], max_tokens=3, temperature=0)
    answers = await asyncio.gather(*(server.post(EMBEDDINGS, input=text) for text in texts))
    again = np.concatenate([vectors(answer) for answer in answers])
    np.testing.assert_allclose(again, [cat, couch, stocks], atol=1e-5)


async def test_more_inputs_than_the_engine_takes_at_once(start_server: StartServer) -> None:
    """Inputs beyond the queue's limit take turns and come back in order, and every block is free afterwards."""
    served = await start_server(max_batch=2, max_waiting=2)
    texts = [f"number {index}" for index in range(9)]
    found = vectors(await served.post(EMBEDDINGS, input=texts))
    alone = vectors(await served.post(EMBEDDINGS, input=texts[7]))
    np.testing.assert_allclose(found[7], alone[0], atol=1e-5)
    await until(served, lambda: all_free(served))
