"""What a runner that has a part of a model exchanges with those that have the other parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from backend.model_loader.weights import Linear

Product = Callable[[torch.Tensor], torch.Tensor]
"""[T, in] to [T, out]."""
Projection = Callable[[torch.Tensor, Product], torch.Tensor]
"""From a part's inputs to its addend of [T, hidden]; the product is with the weight that the part has."""


class Exchange(Protocol):
    """Joins what the parts of a layer compute. Every runner calls the same methods in the same order."""

    def lookup(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, hidden] of tokens, integers [T]; ``embedding`` is the part that this runner has."""
        ...

    def projection(self, linear: Linear) -> Projection:
        """How the last matrix of attention or of an MLP is multiplied with."""
        ...

    def sum(self, addend: torch.Tensor) -> torch.Tensor:
        """The sum of all parts' addends [T, hidden], the same bits in each of them."""
        ...

    def least(self, number: int) -> int:
        """The least of the numbers of all parts, those of other stages included."""
        ...


def plain_product(x: torch.Tensor, product: Product) -> torch.Tensor:
    """The `Projection` of a matrix that is whole, or divided along its inputs."""
    return product(x)


class NoExchange:
    """For a runner that has the whole model."""

    def lookup(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Exchange.lookup`."""
        return functional.embedding(token_ids, embedding)

    def projection(self, linear: Linear) -> Projection:
        """See `Exchange.projection`."""
        return plain_product

    def sum(self, addend: torch.Tensor) -> torch.Tensor:
        """See `Exchange.sum`."""
        return addend

    def least(self, number: int) -> int:
        """See `Exchange.least`."""
        return number
