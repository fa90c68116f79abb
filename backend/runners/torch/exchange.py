"""What a runner that has a part of a model exchanges with those that have the other parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from backend.model_loader.weights import Linear
from backend.runners.torch.linear import TorchLinear
from backend.runners.torch.quantized_matmul import KernelTable


class Exchange(Protocol):
    """Joins what the parts of a layer compute. Every runner calls the same methods in the same order."""

    def lookup(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, hidden] of tokens int64 [T]; ``embedding`` is the part that this runner has."""
        ...

    def projection(
        self, linear: Linear, dtype: torch.dtype, table: KernelTable
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product with the last matrix of attention or of an MLP: this part's addend of [T, hidden]."""
        ...

    def sum(self, addend: torch.Tensor) -> torch.Tensor:
        """The sum of all parts' addends [T, hidden], the same bits in each of them."""
        ...


class NoExchange:
    """For a runner that has the whole model."""

    def lookup(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Exchange.lookup`."""
        return embedding[token_ids]

    def projection(
        self, linear: Linear, dtype: torch.dtype, table: KernelTable
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Exchange.projection`."""
        return TorchLinear((linear,), dtype, table)

    def sum(self, addend: torch.Tensor) -> torch.Tensor:
        """See `Exchange.sum`."""
        return addend
