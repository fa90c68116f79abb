"""Scores of a text, against known values and against transformers."""

from __future__ import annotations

import dataclasses
import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from backend.engine.model_runner import ModelRunner, StepInput, StepOutput
from backend.errors import ModelError
from backend.evaluation.perplexity import evaluate
from backend.evaluation.scores import Window, kl_divergence, score
from backend.model_loader.source import ModelSource
from backend.model_loader.weights import ModelWeights, dense, load_weights, read_config
from backend.models.config import ModelConfig
from backend.runners.fused.runner import FusedRunner
from backend.runners.torch.runner import TorchRunner
from backend.runners.warm_up import single_sequence_step
from backend.text.token_ids import token_ids
from tests.backend import tiny_model
from tests.backend.conftest import built_library
from tests.backend.engine.test_engine_faults import Around
from tests.backend.random_models import KINDS, random_tokens, save
from tests.backend.speculation.drafting import VOCABULARY

TEXT = Path(__file__).parents[3] / "benchmarks" / "data" / "wikitext-2" / "test.txt.gz"
TOKENS = np.random.default_rng(5).integers(tiny_model.POISON + 1, VOCABULARY, 150).astype(np.int32)
BLOCKS = 16


class Watched(Around):
    """A runner that records its steps, with another step size if one is given."""

    def __init__(self, runner: ModelRunner, step_tokens: int = 128) -> None:
        super().__init__(runner)
        self.step_tokens = step_tokens
        self.steps: list[StepInput] = []

    def run(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        return self._runner.run(step)


def transformers_perplexity(model: Any, tokens: np.typing.NDArray[np.int32], window: int, stride: int) -> float:
    """The perplexity by the guide of transformers for models of fixed length."""
    ids = torch.from_numpy(tokens).long().unsqueeze(0)
    total, count, last = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : -(end - last)] = -100
        with torch.inference_mode():
            loss = float(model(ids[:, begin:end], labels=labels).loss)
        scored = int((labels[:, 1:] != -100).sum())
        total, count, last = total + loss * scored, count + scored, end
        if end == ids.shape[1]:
            break
    return math.exp(total / count)


@pytest.mark.parametrize("make", [tiny_model.fused, tiny_model.reference])
def test_equal_logits_have_the_perplexity_of_the_vocabulary(make: Any) -> None:
    """A model whose logits are all equal has the size of its vocabulary as perplexity."""
    empty = dataclasses.replace(tiny_model.weights(), head=torch.zeros(VOCABULARY, 128))
    runner = (
        TorchRunner(tiny_model.CONFIG, empty, BLOCKS, 256)
        if make is tiny_model.reference
        else FusedRunner(built_library(), tiny_model.CONFIG, empty, BLOCKS, 256, 1)
    )
    assert evaluate(TOKENS, runner, None, 64, 32).perplexity == pytest.approx(VOCABULARY, rel=1e-6)


def test_a_model_loses_nothing_against_itself() -> None:
    """A model compared with itself has no divergence, though the two runners use other chunks."""
    reference, other = tiny_model.fused(BLOCKS), Watched(tiny_model.fused(BLOCKS), 7)
    evaluation = evaluate(TOKENS, other, reference, 64, 32)
    assert evaluation.loss is not None
    assert (evaluation.loss.kl_mean, evaluation.loss.kl_p99, evaluation.loss.top1_agreement) == (0.0, 0.0, 1.0)
    assert (
        evaluation.perplexity
        == evaluation.loss.reference_perplexity
        == evaluate(TOKENS, other, None, 64, 32).perplexity
    )


def test_losses_are_those_of_the_whole_distributions() -> None:
    """Perplexity, KL and agreement of two models equal those computed from their whole distributions."""
    reference, other = tiny_model.fused(BLOCKS), tiny_model.fused(BLOCKS, "int4")
    evaluation = evaluate(TOKENS, other, reference, len(TOKENS), 1)
    following = torch.from_numpy(TOKENS[1:]).long()
    expected, got = (r.run(single_sequence_step(TOKENS[:-1], 0)).logits.double() for r in (reference, other))
    kl = functional.kl_div(got.log_softmax(-1), expected.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    loss = evaluation.loss
    assert loss is not None
    assert evaluation.tokens == len(TOKENS) - 1
    assert evaluation.perplexity == pytest.approx(float(functional.cross_entropy(got, following).exp()), rel=1e-6)
    assert loss.reference_perplexity == pytest.approx(
        float(functional.cross_entropy(expected, following).exp()), rel=1e-6
    )
    assert loss.kl_mean == pytest.approx(float(kl.mean()), rel=1e-4)
    assert loss.kl_p99 == pytest.approx(float(kl.quantile(0.99)), rel=1e-4)
    assert loss.top1_agreement == pytest.approx(float((expected.argmax(-1) == got.argmax(-1)).double().mean()))
    assert 0 < loss.kl_mean < loss.kl_p99
    assert loss.top1_agreement < 1


@given(st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=2, max_size=6))
def test_divergence_is_never_below_zero(logits: list[tuple[float, float]]) -> None:
    """The KL divergence is never below zero, up to float32 rounding, and is zero of a distribution from itself."""
    expected, got = torch.tensor(logits, dtype=torch.float32).T.contiguous().log_softmax(-1)
    assert float(kl_divergence(expected, got)) >= -1e-5
    assert float(kl_divergence(expected, expected)) == 0


def test_divergence_of_two_coins() -> None:
    """KL(1/2, 1/2 || 1/4, 3/4) is ln 2 - ln 3 / 2, and the reverse divergence differs."""
    fair, loaded = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert float(kl_divergence(fair, loaded)) == pytest.approx(math.log(2) - math.log(3) / 2)
    assert float(kl_divergence(loaded, fair)) == pytest.approx(0.75 * math.log(3) - math.log(2))


def test_steps_compute_only_the_logits_that_are_scored() -> None:
    """Steps compute the logits of scored tokens only, and no more at a time than a step has rows."""
    runner = Watched(tiny_model.fused(BLOCKS), 10)
    scores = score(TOKENS, Window(20, 53, 90), runner, [])
    assert [len(step.token_ids) for step in runner.steps] == [10] * 6 + [9]
    assert [len(step.logits_rows) for step in runner.steps] == [0, 0, 0, 8, 10, 10, 9]
    assert len(scores[0].nll) == 90 - 53


def test_nan_logits_are_an_error_with_the_runners_name() -> None:
    """Logits that are not finite are an error with the runner's name instead of a perplexity."""
    tokens = TOKENS.copy()
    tokens[70] = tiny_model.POISON
    with pytest.raises(ModelError, match=r"fused-float16: the logits after token .* are not finite"):
        evaluate(tokens, tiny_model.fused(BLOCKS), None, 64, 32)


def test_an_infinite_perplexity_is_an_error() -> None:
    """An infinite perplexity is an error that says that the model does not fit the text."""
    made = tiny_model.weights()
    sure = dataclasses.replace(made, head=1e6 * dense(made.head))
    with pytest.raises(ModelError, match="this model does not fit the text"):
        evaluate(TOKENS, TorchRunner(tiny_model.CONFIG, sure, BLOCKS, 256), None, 64, 32)


@pytest.mark.parametrize(("window", "stride"), [(64, 32), (64, 63), (40, 7), (200, 100)])
def test_perplexity_matches_transformers(tmp_path: Path, window: int, stride: int) -> None:
    """The perplexity matches transformers for every window and stride."""
    theirs = save(KINDS["smollm2"], tmp_path)
    config, tokens = read_config(tmp_path), random_tokens(170)
    ours = TorchRunner(config, load_weights(tmp_path, config), BLOCKS, 256)
    expected = transformers_perplexity(theirs, tokens, window, stride)
    assert evaluate(tokens, ours, None, window, stride).perplexity == pytest.approx(expected, rel=1e-4)


def test_perplexity_of_the_bundled_model_matches_transformers(
    source: ModelSource, config: ModelConfig, weights: ModelWeights
) -> None:
    """The bundled model's perplexity on 2,000 tokens of WikiText-2 matches transformers up to half float rounding."""
    from tokenizers import Tokenizer

    text = gzip.decompress(TEXT.read_bytes()).decode()[:20000]
    tokens = np.array(token_ids(Tokenizer.from_file(str(source.directory / "tokenizer.json")), text), dtype=np.int32)
    tokens = tokens[:2001]
    assert len(tokens) == 2001
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32)
    ours = FusedRunner(built_library(), config, weights, 32, 512, 2)
    evaluation = evaluate(tokens, ours, None, 512, 511)
    assert evaluation.tokens == 2000
    assert evaluation.perplexity == pytest.approx(transformers_perplexity(theirs, tokens, 512, 511), rel=5e-3)
