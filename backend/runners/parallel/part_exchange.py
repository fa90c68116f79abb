"""How the ranks of a stage join the parts of a layer that each of them computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from backend.model_loader.weights import Linear, PartialOutputs
from backend.models.partition import ModelPart
from backend.runners.torch.exchange import Product, Projection, plain_product


class PartExchange:
    """An `Exchange` among the ranks of a stage.

    Args:
        add: replaces an addend by the sum over the ranks, and returns it.
        least: as in `Exchange`.
    """

    def __init__(
        self, part: ModelPart, add: Callable[[torch.Tensor], torch.Tensor], least: Callable[[int], int]
    ) -> None:
        self._rows = part.vocabulary
        self.sum = add
        self.least = least

    def lookup(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Exchange.lookup`: zeros for the rows that other ranks have, then a sum, which changes no bit."""
        own = token_ids - self._rows.start
        is_elsewhere = (own < 0) | (own >= len(self._rows))
        found = functional.embedding(own.masked_fill(is_elsewhere, 0), embedding)
        return self.sum(found.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def projection(self, linear: Linear) -> Projection:
        """See `Exchange.projection`."""
        return _GatheredProduct(linear, self.sum) if isinstance(linear, PartialOutputs) else plain_product


class _GatheredProduct:
    """Some outputs of a matrix that is not divided along its inputs: these are gathered from all ranks first.

    Both gatherings are sums with zeros, so each output is, bit for bit, what a product with the whole rows gives.
    """

    def __init__(self, linear: PartialOutputs, add: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._num_inputs = linear.weight.shape[1]
        self._num_outputs = linear.num_outputs
        self._inputs = slice(linear.inputs.start, linear.inputs.stop)
        self._outputs = slice(linear.outputs.start, linear.outputs.stop)
        self._sum = add

    def __call__(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        inputs = x.new_zeros(len(x), self._num_inputs)
        inputs[:, self._inputs] = x
        outputs = x.new_zeros(len(x), self._num_outputs)
        outputs[:, self._outputs] = product(self._sum(inputs))
        return outputs
