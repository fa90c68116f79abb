"""Medusa's heads: trained on the real model, stopped and gone on with, and refused where they do not belong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from backend.commands import train_medusa
from backend.engine.engine import Engine
from backend.engine.sequence import SamplingParams, Sequence
from backend.errors import ModelError
from backend.model import ServedModel
from backend.speculation.medusa import MedusaHeads, MedusaWeights, load_medusa
from backend.speculation.medusa_training import MedusaTraining, Trained, TrainingPlan
from backend.text.detokenizer import Detokenizer
from tests.backend.speculation.drafting import eager

TEXT = "The river is long and wide. The sea is deep and blue. The hill is high and green. " * 40
PLAN = TrainingPlan(
    heads=2, vocabulary=512, answers=8, prompt_tokens=16, answer_tokens=32, steps=60, batch=64, learning_rate=3e-3
)


class Stopped(Exception):
    """Of a training, by its user."""


@pytest.fixture(scope="module")
def trained(model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """Heads that were stopped once in each stage."""
    out = tmp_path_factory.mktemp("trained") / "heads"
    stops = {"answers": 0, "hidden states": 3, "heads": 40}

    def advance(stage: str, done: int, whole: int, remark: str) -> None:
        if stage in stops and done >= stops[stage]:
            del stops[stage]
            raise Stopped

    for _ in range(3):
        with pytest.raises(Stopped):
            MedusaTraining(model, TEXT, PLAN, out, advance).run()
    return out, MedusaTraining(model, TEXT, PLAN, out, advance).run()


def test_training_goes_on_and_learns(trained: tuple[Path, Trained]) -> None:
    """The loss falls, also of what was held out; the picture and the heads are there."""
    out, report = trained
    assert report.losses[-1][0] == PLAN.steps
    assert report.loss < report.losses[0][2] or len(report.losses) == 1
    assert report.accuracy[0] > 0.2
    assert (out / "loss.svg").read_text().startswith("<svg")
    assert not list(out.glob("*.part"))


def test_trained_heads_save_steps_and_change_nothing(model: ServedModel, trained: tuple[Path, Trained]) -> None:
    """An answer takes fewer steps with them, and is the same."""
    out, _ = trained
    config = model.config
    heads = MedusaHeads(load_medusa(out, model.directory, config.hidden_size, config.vocab_size))
    prompt = model.tokenizer.fast.encode(TEXT[:200], add_special_tokens=False).ids
    answers = []
    for speculator in (None, eager(medusa=heads)):
        engine = Engine(model.runner, 1, None, shares_prefixes=False, speculator=speculator)
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        sequence = Sequence(0, prompt, params, Detokenizer(model.tokenizer.token_bytes), 0)
        engine.add(sequence)
        while engine.has_work:
            engine.step()
        answers.append((sequence.tokens, engine.stats()))
    (plain, _), (drafted, stats) = answers
    assert drafted == plain
    assert sum(counts.accepted_tokens for counts in stats.drafts.values()) > 0


def test_a_tree_has_the_likeliest_guesses_first() -> None:
    """Tokens come after those that they follow, by falling probability, as many as are asked for."""
    numbers = torch.Generator().manual_seed(1)
    weights = MedusaWeights(
        blocks=torch.randn(3, 8, 8, generator=numbers),
        biases=torch.randn(3, 8, generator=numbers),
        output=torch.randn(30, 8, generator=numbers),
        token_ids=torch.arange(30) * 2,
    )
    states = list(torch.randn(4, 8, generator=numbers))
    for state, tree in zip(states, MedusaHeads(weights).trees(states, 12), strict=True):
        shares = weights.logits(state[None])[0].softmax(-1)
        assert len(tree.token_ids) == 12
        assert list(tree.probabilities) == sorted(tree.probabilities, reverse=True)
        depths: list[int] = []
        for place, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            assert parent < place
            depths.append(0 if parent < 0 else depths[parent] + 1)
            before = 1.0 if parent < 0 else tree.probabilities[parent]
            assert tree.probabilities[place] == pytest.approx(before * float(shares[depths[-1], token // 2]), rel=1e-4)
        assert len({*zip(tree.token_ids, tree.parents, strict=True)}) == 12


def test_heads_of_another_model_are_refused(model: ServedModel, trained: tuple[Path, Trained], tmp_path: Path) -> None:
    """Each refusal names the file, and what would be right."""
    out, _ = trained
    size, vocabulary = model.config.hidden_size, model.config.vocab_size
    (tmp_path / "model.safetensors").write_bytes(b"another")
    with pytest.raises(ModelError, match=r"medusa\.safetensors: these heads are of another model"):
        load_medusa(out, tmp_path, size, vocabulary)
    with pytest.raises(ModelError, match="no heads can be read"):
        load_medusa(tmp_path, model.directory, size, vocabulary)
    with pytest.raises(ModelError, match="do not fit"):
        load_medusa(out, model.directory, size + 1, vocabulary)


def test_another_plan_or_a_full_directory_is_refused(
    model: ServedModel, trained: tuple[Path, Trained], tmp_path: Path
) -> None:
    """Nothing is written over."""
    out, _ = trained
    (tmp_path / "file").write_text("of somebody")

    def nothing(stage: str, done: int, whole: int, remark: str) -> None:
        """Progress that nobody reads."""

    with pytest.raises(ModelError, match="another model, text or plan"):
        MedusaTraining(model, TEXT, TrainingPlan(heads=3), out, nothing)
    with pytest.raises(ModelError, match="is not empty and has no heads"):
        MedusaTraining(model, TEXT, PLAN, tmp_path, nothing)
    with pytest.raises(ModelError, match="--text: has 2 tokens, expected at least 32"):
        MedusaTraining(model, "Two words", PLAN, tmp_path / "new", nothing)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["default", "--out", "x"], 2, "--text"),
        (["default", "--text", "missing.txt", "--out", "x"], 1, "missing.txt: cannot be read: No such file"),
        (["default", "--text", "broken.gz", "--out", "x"], 1, "broken.gz: not a whole gzip file"),
        (["default", "--text", "a", "--out", "x", "--heads", "9"], 2, "--heads"),
    ],
)
def test_a_wrong_command_is_told(
    words: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"text")[:10])
    monkeypatch.setattr(train_medusa, "exit_on_broken_pipe", lambda: None)
    if status == 2:
        with pytest.raises(SystemExit, match="2"):
            train_medusa.run(words)
    else:
        assert train_medusa.run(words) == status
    assert message in capsys.readouterr().err


def test_the_plan_is_kept_with_the_heads(trained: tuple[Path, Trained]) -> None:
    """So that it is seen what they were trained with."""
    assert json.loads((trained[0] / "plan.json").read_text())["plan"]["heads"] == 2
