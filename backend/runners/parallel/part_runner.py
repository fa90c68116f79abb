"""Runs steps on one rank's part of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend.engine.model_runner import StepInput, StepOutput
from backend.model_loader.weights import ModelWeights
from backend.models.config import KvDtype, ModelConfig
from backend.models.partition import ModelPart, partition
from backend.runners.parallel.communicator import Communicator
from backend.runners.parallel.micro_batches import micro_batches
from backend.runners.parallel.part_exchange import PartExchange
from backend.runners.torch.kv_memory import KvMemory
from backend.runners.torch.runner import TorchRunner


class PartRunner:
    """The torch runner on a part of the model: some layers, and of each some heads and inner features.

    Every rank gets the same steps. Rank 0 gets logits and hidden states from the ranks of the last stage.

    Args:
        config: of the whole model.
        weights: of the part.
        memory: keys and values of the whole model; a KV head that several ranks have is written by each of them, with
            the same numbers up to rounding.
        others: as in `TorchRunner`.
    """

    def __init__(
        self,
        config: ModelConfig,
        part: ModelPart,
        weights: ModelWeights,
        memory: KvMemory,
        communicator: Communicator,
        num_blocks: int,
        max_context: int,
        dtype: torch.dtype,
        kv_dtype: KvDtype,
    ) -> None:
        self._part = part
        last_stage = partition(config, part.tensor_ranks, part.stages)[-part.tensor_ranks :]
        self._last = last_stage[0].rank
        self._widths = [len(of.vocabulary) for of in last_stage]
        self._communicator = communicator
        self._hidden_size = config.hidden_size
        self._dtype = dtype
        own = (slice(of.start, of.stop) for of in (part.layers, part.kv_heads))
        self.runner = TorchRunner(
            part.config(config),
            weights,
            num_blocks,
            max_context,
            dtype,
            kv_dtype,
            memory=memory.part(*own),
            exchange=PartExchange(part, communicator),
        )

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput | None:
        """Computes a step on this part; the output is rank 0's alone.

        Raises:
            PeerLost: another rank does not take part.
        """
        part = self._part
        batches = micro_batches(step, part.stages)
        sent: list[Callable[[], None]] = []
        computed: list[StepOutput] = []
        for batch in batches:
            hidden = self.runner.layers(batch, self.runner.embed(batch) if part.is_first else self._received(batch))
            if not part.is_last:
                sent.append(self._communicator.send(hidden, part.rank + part.tensor_ranks))
                continue
            output = self.runner.outputs(batch, hidden)
            logits = self._communicator.gather(output.logits, self._widths)
            if logits is None:
                continue
            if part.rank == 0:
                computed.append(StepOutput(logits, output.hidden))
                continue
            sent += [self._communicator.send(tensor, 0) for tensor in (logits, output.hidden)]
        if part.rank == 0 and not part.is_last:
            computed = [self._collected(batch) for batch in batches]
        for wait in sent:
            wait()
        return _joined(computed) if computed else None

    def _received(self, batch: StepInput) -> torch.Tensor:
        """What left the last layer of the stage before, [T, hidden]."""
        part = self._part
        shape = (len(batch.token_ids), self._hidden_size)
        return self._communicator.receive(shape, self._dtype, part.rank - part.tensor_ranks)

    def _collected(self, batch: StepInput) -> StepOutput:
        """The output of a micro-batch from the first rank of the last stage."""
        logits, hidden = (
            self._communicator.receive((len(rows), width), torch.float32, self._last)
            for rows, width in ((batch.logits_rows, sum(self._widths)), (batch.hidden_rows, self._hidden_size))
        )
        return StepOutput(logits, hidden)


def _joined(outputs: list[StepOutput]) -> StepOutput:
    if len(outputs) == 1:
        return outputs[0]
    return StepOutput(torch.cat([of.logits for of in outputs]), torch.cat([of.hidden for of in outputs]))
