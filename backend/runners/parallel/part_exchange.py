"""How the ranks of a stage join the parts of a layer that each of them computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend.model_loader.weights import Linear, PartialOutputs
from backend.models.partition import ModelPart
from backend.runners.parallel.communicator import Communicator
from backend.runners.torch.linear import TorchLinear
from backend.runners.torch.quantized_matmul import KernelTable


class PartExchange:
    """An `Exchange` among the ranks of a stage."""

    def __init__(self, part: ModelPart, communicator: Communicator) -> None:
        self._rows = part.vocabulary
        self.sum = communicator.sum

    def lookup(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Exchange.lookup`: zeros for the rows that other ranks have, then a sum, which changes no bit."""
        own = token_ids - self._rows.start
        is_elsewhere = (own < 0) | (own >= len(self._rows))
        found = embedding[own.masked_fill(is_elsewhere, 0)]
        return self.sum(found.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def projection(
        self, linear: Linear, dtype: torch.dtype, table: KernelTable
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Exchange.projection`."""
        if isinstance(linear, PartialOutputs):
            return _GatheredProduct(linear, dtype, table, self.sum)
        return TorchLinear((linear,), dtype, table)


class _GatheredProduct:
    """Some outputs of a matrix that is not divided along its inputs: these are gathered from all ranks first.

    Both gatherings are sums with zeros, so each output is, bit for bit, what a product with the whole rows gives.
    """

    def __init__(
        self,
        linear: PartialOutputs,
        dtype: torch.dtype,
        table: KernelTable,
        add: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._product = TorchLinear((Linear(linear.weight, linear.bias),), dtype, table)
        self._num_inputs = linear.weight.shape[1]
        self._num_outputs = linear.num_outputs
        self._inputs = slice(linear.inputs.start, linear.inputs.stop)
        self._outputs = slice(linear.outputs.start, linear.outputs.stop)
        self._sum = add

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inputs = x.new_zeros(len(x), self._num_inputs)
        inputs[:, self._inputs] = x
        outputs = x.new_zeros(len(x), self._num_outputs)
        outputs[:, self._outputs] = self._product(self._sum(inputs))
        return outputs
