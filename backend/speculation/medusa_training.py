"""Trains Medusa's heads on a frozen model: its own answers, their hidden states, and then the heads."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.format import open_memmap
from torch.nn import functional

from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE, SequenceRows, pack
from backend.engine.sequence import SamplingParams, Sequence
from backend.errors import ModelError
from backend.model import ServedModel
from backend.model_loader.weights import dense, load_weights
from backend.speculation.medusa import MedusaWeights, model_digest
from backend.text.detokenizer import Detokenizer

Advance = Callable[[str, int, int, str], None]
"""Called with a stage's name, what is done of it and how much there is, and a remark."""

_HELD_OUT = 0.05
"""Of the answers, to measure the heads on what they were not trained on."""
_LATER = 0.8
"""Weight of each head's loss beside that of the head before it (arXiv 2401.10774, section 2.3)."""
_SAVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How heads are trained. Another plan does not go on from the files of this one."""

    heads: int = 4
    vocabulary: int = 8192
    """The most frequent tokens of the answers, which the heads may guess."""
    answers: int = 512
    prompt_tokens: int = 64
    answer_tokens: int = 192
    steps: int = 1500
    batch: int = 512
    """Tokens in one step of the optimiser."""
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out, measured on answers that were held out."""

    loss: float
    """Nats, the mean of the heads."""
    accuracy: tuple[float, ...]
    """Share of the tokens that are each head's best guess."""
    tokens: int
    """Trained on."""
    losses: tuple[tuple[int, float, float], ...]
    """Step, loss in training, and on what was held out."""


class MedusaTraining:
    """Three stages, each of which goes on where it was stopped: answers, hidden states, heads.

    The heads learn to guess what the model itself says (self-distillation), for that is what a step verifies: a text
    gives the prompts, the model continues each of them greedily, and the hidden states of its answers go to a file.

    Args:
        out: directory of the heads and of what is not finished; made if it is not there.

    Raises:
        ModelError: the directory has something else, or of another plan.
    """

    def __init__(self, model: ServedModel, text: str, plan: TrainingPlan, out: Path, advance: Advance) -> None:
        self._model = model
        self._plan = plan
        self._out = out
        self._advance = advance
        self._digest = model_digest(model.directory)
        out.mkdir(parents=True, exist_ok=True)
        about = {"plan": asdict(plan), "model": self._digest, "text": len(text)}
        self._check(out / "plan.json", about)
        self._prompts = self._cut(text)

    def run(self) -> Trained:
        """All stages; returns what was measured at the end."""
        tokens = self._answers()
        states = self._states(tokens)
        return self._train(tokens, states)

    def _check(self, file: Path, about: dict[str, object]) -> None:
        if file.exists():
            if json.loads(file.read_text(encoding="utf-8")) != about:
                raise ModelError(f"{self._out}: has heads of another model, text or plan; expected a new directory")
            return
        if any(self._out.iterdir()):
            raise ModelError(f"{self._out}: is not empty and has no heads; expected a new directory")
        file.write_text(json.dumps(about), encoding="utf-8")

    def _cut(self, text: str) -> npt.NDArray[np.int32]:
        """Prompts [answers, prompt_tokens], at equal distances in the text."""
        ids = np.array(self._model.tokenizer.fast.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        count, length = self._plan.answers, self._plan.prompt_tokens
        if len(ids) < 2 * length:
            raise ModelError(f"--text: has {len(ids)} tokens, expected at least {2 * length}")
        starts = np.linspace(0, len(ids) - length, count).astype(int)
        return np.stack([ids[start : start + length] for start in starts])

    def _answers(self) -> npt.NDArray[np.int32]:
        """Prompts and the model's answers, [answers, prompt_tokens + answer_tokens]."""
        plan, model = self._plan, self._model
        whole = plan.prompt_tokens + plan.answer_tokens
        file = self._out / "answers.npy"
        done_file = self._out / "answers.done"
        shape = (plan.answers, whole)
        tokens = open_memmap(file, "r+" if file.exists() else "w+", np.int32, None if file.exists() else shape)
        done = int(done_file.read_text()) if done_file.exists() else 0
        batch = model.runner.max_batch
        params = SamplingParams(max_tokens=plan.answer_tokens, temperature=0.0, ignore_eos=True)
        while done < plan.answers:
            self._advance("answers", done, plan.answers, "")
            engine = Engine(model.runner, batch, None, shares_prefixes=False)
            sequences = [
                Sequence(place, self._prompts[place].tolist(), params, Detokenizer(model.tokenizer.token_bytes), place)
                for place in range(done, min(done + batch, plan.answers))
            ]
            for sequence in sequences:
                engine.add(sequence)
            while engine.has_work:
                engine.step()
            for sequence in sequences:
                tokens[sequence.id] = sequence.tokens
            done += len(sequences)
            tokens.flush()
            done_file.write_text(str(done))
        self._advance("answers", done, plan.answers, "")
        return tokens

    def _states(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float16]:
        """Hidden states after the last norm, float16 [answers, prompt_tokens + answer_tokens, hidden_size]."""
        runner, size = self._model.runner, self._model.config.hidden_size
        file, done_file = self._out / "states.npy", self._out / "states.done"
        shape = (*tokens.shape, size)
        states = open_memmap(file, "r+" if file.exists() else "w+", np.float16, None if file.exists() else shape)
        done = int(done_file.read_text()) if done_file.exists() else 0
        length = tokens.shape[1]
        blocks = range(-(-length // BLOCK_SIZE))
        for place in range(done, len(tokens)):
            self._advance("hidden states", place, len(tokens), "")
            for start in range(0, length, runner.step_tokens):
                chunk = tokens[place, start : start + runner.step_tokens].tolist()
                step = pack([SequenceRows(chunk, start, blocks)], [], range(len(chunk)))
                states[place, start : start + len(chunk)] = runner.run(step).hidden.cpu().numpy()
            done_file.write_text(str(place + 1))
        self._advance("hidden states", len(tokens), len(tokens), "")
        return states

    def _train(self, tokens: npt.NDArray[np.int32], states: npt.NDArray[np.float16]) -> Trained:
        plan = self._plan
        held_out = max(1, int(_HELD_OUT * len(tokens)))
        frequent = self._frequent(tokens[:-held_out])
        generator = torch.Generator().manual_seed(plan.seed)
        weights = self._begin(frequent)
        parameters = [weights.blocks, weights.biases, weights.output]
        optimizer = torch.optim.AdamW(parameters, plan.learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, plan.learning_rate, plan.steps + 1, pct_start=0.05)
        losses: list[tuple[int, float, float]] = []
        file, first = self._out / "training.pt", 0
        if file.exists():
            kept = torch.load(file, weights_only=True)
            first, losses = kept["step"], [tuple(loss) for loss in kept["losses"]]
            with torch.no_grad():
                for parameter, value in zip(parameters, kept["parameters"], strict=True):
                    parameter.copy_(value)
            optimizer.load_state_dict(kept["optimizer"])
            schedule.load_state_dict(kept["schedule"])
            generator.set_state(kept["generator"])
        samples = _Samples(tokens[:-held_out], states[:-held_out], plan, frequent)
        kept_back = _Samples(tokens[-held_out:], states[-held_out:], plan, frequent)
        saved = time.monotonic()
        recent = losses[-1][1] if losses else math.nan
        for step in range(first, plan.steps):
            inputs, targets = samples.draw(generator)
            loss = _loss(weights, inputs, targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own gap
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            measured = float(loss.detach())
            recent = measured if math.isnan(recent) else 0.95 * recent + 0.05 * measured
            last = step + 1 == plan.steps
            if last or step % 100 == 99:
                losses.append((step + 1, recent, kept_back.loss(weights)))
                (self._out / "loss.svg").write_text(_plot(losses), encoding="utf-8")
            if last or time.monotonic() - saved > _SAVE_SECONDS:
                self._save(file, step + 1, parameters, optimizer, schedule, generator, losses)
                saved = time.monotonic()
            self._advance("heads", step + 1, plan.steps, f"loss {recent:.3f}")
        weights.save(self._out, self._digest)
        return Trained(losses[-1][2], kept_back.accuracy(weights), samples.count, tuple(losses))

    def _frequent(self, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
        """The tokens that heads may guess, by falling frequency."""
        answers = tokens[:, self._plan.prompt_tokens :]
        counts = np.bincount(answers.ravel(), minlength=self._model.config.vocab_size)
        kept = min(self._plan.vocabulary, int(np.count_nonzero(counts)))
        return torch.from_numpy(np.argsort(-counts, kind="stable")[:kept].copy())

    def _begin(self, frequent: torch.Tensor) -> MedusaWeights:
        """Heads that guess what the model itself would say next; training moves them on from there."""
        head = dense(load_weights(self._model.directory, self._model.config).head).float()
        size, count = head.shape[1], self._plan.heads
        return MedusaWeights(
            torch.zeros(count, size, size, requires_grad=True),
            torch.zeros(count, size, requires_grad=True),
            head[frequent].clone().requires_grad_(),
            frequent,
        )

    def _save(
        self,
        file: Path,
        step: int,
        parameters: list[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        generator: torch.Generator,
        losses: list[tuple[int, float, float]],
    ) -> None:
        part = file.with_suffix(".part")
        torch.save(
            {
                "step": step,
                "parameters": [parameter.detach() for parameter in parameters],
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "generator": generator.get_state(),
                "losses": losses,
            },
            part,
        )
        part.replace(file)


class _Samples:
    """Hidden states and the tokens that the heads have to guess from them."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        states: npt.NDArray[np.float16],
        plan: TrainingPlan,
        frequent: torch.Tensor,
    ) -> None:
        self._plan = plan
        # A token is sampled from the state before it, and head k guesses the one k + 1 places after that.
        first, last = plan.prompt_tokens - 1, tokens.shape[1] - plan.heads - 1
        self._states = torch.from_numpy(states[:, first:last].reshape(-1, states.shape[2]).copy())
        guessed = [tokens[:, first + 2 + head : last + 2 + head] for head in range(plan.heads)]
        rows = torch.full((int(max(tokens.max(), frequent.max())) + 1,), -1, dtype=torch.long)
        rows[frequent] = torch.arange(len(frequent))
        self._targets = rows[torch.from_numpy(np.stack(guessed, axis=-1).reshape(-1, plan.heads).astype(np.int64))]

    @property
    def count(self) -> int:
        return len(self._states)

    def draw(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [batch, hidden_size] and int64 [batch, heads]; -1: the token is none that a head may guess."""
        places = torch.randint(self.count, (self._plan.batch,), generator=generator)
        return self._states[places].float(), self._targets[places]

    @torch.inference_mode()
    def loss(self, weights: MedusaWeights) -> float:
        parts = [float(_loss(weights, states, targets)) * len(states) for states, targets in self._pieces()]
        return sum(parts) / self.count

    @torch.inference_mode()
    def accuracy(self, weights: MedusaWeights) -> tuple[float, ...]:
        right = torch.zeros(self._plan.heads)
        for states, targets in self._pieces():
            right += (weights.logits(states).argmax(-1) == targets).float().sum(0)
        return tuple((right / self.count).tolist())

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, self.count, self._plan.batch):
            part = slice(start, start + self._plan.batch)
            yield self._states[part].float(), self._targets[part]


def _loss(weights: MedusaWeights, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, the mean of the heads, of which each later one counts less."""
    logits = weights.logits(states)
    shares = _LATER ** torch.arange(logits.shape[1])
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction="none").mean(0)
    return (losses * shares).sum() / shares.sum()


def _plot(losses: list[tuple[int, float, float]]) -> str:
    """A picture of the loss by step: in training, and on what was held out (dashed)."""
    width, height, left, bottom = 640, 360, 60, 40
    last, values = losses[-1][0], [value for _, *both in losses for value in both]
    low, high = min(values), max(values) + 1e-9

    def path(place: int) -> str:
        points = [
            f"{left + (width - left - 20) * loss[0] / last:.1f},"
            f"{20 + (height - bottom - 20) * (high - loss[place]) / (high - low):.1f}"
            for loss in losses
        ]
        return " ".join(points)

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{width}" height="{height}" fill="white"/>'
        f'<polyline points="{path(1)}" fill="none" stroke="#1f6feb" stroke-width="2"/>'
        f'<polyline points="{path(2)}" fill="none" stroke="#b35900" stroke-width="2" stroke-dasharray="6 4"/>'
        f'<text x="8" y="24">{high:.2f}</text><text x="8" y="{height - bottom}">{low:.2f}</text>'
        f'<text x="{left}" y="{height - 12}">step 0 to {last}; in training, and of what was held out (dashed)</text>'
        "</svg>\n"
    )
