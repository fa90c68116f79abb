"""Medusa's heads: they propose the tokens after the next one, from the hidden state that the next one is sampled from.

Medusa (arXiv 2401.10774): head k guesses the token k + 1 places after a token from the hidden state that this token was
sampled from. The guesses of all heads are a tree, of which the likeliest tokens are verified in one step.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch.nn import functional

from backend.errors import ModelError
from prefix_store.identity.files import digest_of_files

MEDUSA = "medusa"
WEIGHTS_FILE = "medusa.safetensors"

_FORMAT = "keepgate-medusa-1"
_BRANCHES = 6
"""Guesses of one head that are looked at."""
_WEIGHT = 1 / 16
"""Of a new measurement in the time that the heads take."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Guesses, the likeliest first; a token comes after the one that it follows."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]
    """Of each token and all that it follows, as the heads say; falling."""


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """K heads over a hidden state h: the logits of head k are ``output (h + silu(blocks[k] h + biases[k]))``.

    A vocabulary of many rare tokens would make the output matrix as large as the model's. So the heads guess frequent
    tokens only (arXiv 2502.14856), and all have the output matrix in common.
    """

    blocks: torch.Tensor
    """[K, hidden_size, hidden_size]"""
    biases: torch.Tensor
    """[K, hidden_size]"""
    output: torch.Tensor
    """[V, hidden_size]"""
    token_ids: torch.Tensor
    """int64 [V]: the token that each row of the output is for."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[B, hidden_size] to [B, K, V]."""
        changed = torch.einsum("bh,kgh->bkg", states, self.blocks) + self.biases
        return (states.unsqueeze(1) + functional.silu(changed)) @ self.output.T

    def save(self, directory: Path, model_digest: str) -> None:
        """Writes the file of a directory anew, whole or not at all. Raises OSError."""
        part = directory / f"{WEIGHTS_FILE}.part"
        tensors = {
            "blocks": self.blocks.half(),
            "biases": self.biases.half(),
            "output": self.output.half(),
            "token_ids": self.token_ids.to(torch.int32),
        }
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            part,
            {"format": _FORMAT, "model": model_digest},
        )
        part.replace(directory / WEIGHTS_FILE)


def model_digest(directory: Path) -> str:
    """What heads and their model have in common. Raises OSError."""
    return asyncio.run(digest_of_files(sorted(directory.glob("*.safetensors")))).hex()


def load_medusa(directory: Path, model_directory: Path, hidden_size: int, vocab_size: int) -> MedusaWeights:
    """Reads heads that were trained for a model.

    Raises:
        ModelError: there are none, or they are another model's.
    """
    file = directory / WEIGHTS_FILE
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{directory}: no heads can be read from {WEIGHTS_FILE}: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ModelError(f"{file}: expected the format {_FORMAT}, which `keepgate train-medusa` writes")
    if metadata.get("model") != model_digest(model_directory):
        raise ModelError(f"{file}: these heads are of another model; train some for this one")
    weights = MedusaWeights(
        blocks=tensors["blocks"].float(),
        biases=tensors["biases"].float(),
        output=tensors["output"].float(),
        token_ids=tensors["token_ids"].long(),
    )
    if weights.output.shape[1] != hidden_size or int(weights.token_ids.max()) >= vocab_size:
        raise ModelError(f"{file}: these heads do not fit a model of {hidden_size} and {vocab_size} tokens")
    return weights


class MedusaHeads:
    """Heads that guess, on the CPU, where hidden states of all sequences of a step are multiplied at once."""

    def __init__(self, weights: MedusaWeights) -> None:
        self._weights = weights
        self._ids: list[int] = weights.token_ids.tolist()
        self.seconds = 0.0
        """What a call takes; 0 until there was one."""

    @torch.inference_mode()
    def trees(self, states: Sequence[torch.Tensor], most: int) -> list[Tree]:
        """A tree for each hidden state, float32 [hidden_size], of ``most`` tokens at most."""
        began = time.perf_counter()
        logits = self._weights.logits(torch.stack(list(states)))
        best, places = torch.topk(logits, min(_BRANCHES, logits.shape[-1]), dim=-1)
        probabilities = (best - torch.logsumexp(logits, dim=-1, keepdim=True)).exp()
        trees = [
            self._tree(own, tokens, most) for own, tokens in zip(probabilities.tolist(), places.tolist(), strict=True)
        ]
        elapsed = time.perf_counter() - began
        self.seconds += (_WEIGHT if self.seconds else 1.0) * (elapsed - self.seconds)
        return trees

    def _tree(self, probabilities: list[list[float]], places: list[list[int]], most: int) -> Tree:
        """The likeliest tokens, by the product of the probabilities of each and of all that it follows."""
        tokens: list[int] = []
        parents: list[int] = []
        products: list[float] = []
        # Minus its product, the head and the rank of a guess, the token that it follows and that one's product.
        queue = [(-probabilities[0][0], 0, 0, -1, 1.0)]
        while queue and len(tokens) < most:
            negative, head, rank, parent, before = heapq.heappop(queue)
            tokens.append(self._ids[places[head][rank]])
            parents.append(parent)
            products.append(-negative)
            if rank + 1 < len(probabilities[head]):
                heapq.heappush(queue, (-before * probabilities[head][rank + 1], head, rank + 1, parent, before))
            if head + 1 < len(probabilities):
                own = len(tokens) - 1
                heapq.heappush(queue, (negative * probabilities[head + 1][0], head + 1, 0, own, -negative))
        return Tree(tuple(tokens), tuple(parents), tuple(products))
