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
        self._parts = partition(config, part.tensor_ranks, part.stages)
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
            if part.rank == 0:
                computed.append(output)
                continue
            sent.append(self._communicator.send(output.logits, 0))
            if part.tensor_rank == 0:
                sent.append(self._communicator.send(output.hidden, 0))
        whole = [self._collected(at, batch, computed) for at, batch in enumerate(batches)] if part.rank == 0 else []
        for wait in sent:
            wait()
        return _joined(whole) if whole else None

    def _received(self, batch: StepInput) -> torch.Tensor:
        """What left the last layer of the stage before, [T, hidden]."""
        part = self._part
        shape = (len(batch.token_ids), self._hidden_size)
        return self._communicator.receive(shape, self._dtype, part.rank - part.tensor_ranks)

    def _collected(self, at: int, batch: StepInput, computed: list[StepOutput]) -> StepOutput:
        """The output of a micro-batch from the ranks of the last stage; ``computed`` is rank 0's, if it is one."""
        logits = [computed[at].logits] if computed else []
        hidden = computed[at].hidden if computed else None
        for part in self._parts:
            if not part.is_last or part.rank == 0:
                continue
            shape = (len(batch.logits_rows), len(part.vocabulary))
            logits.append(self._communicator.receive(shape, torch.float32, part.rank))
            if part.tensor_rank == 0:
                shape = (len(batch.hidden_rows), self._hidden_size)
                hidden = self._communicator.receive(shape, torch.float32, part.rank)
        assert hidden is not None  # noqa: S101 - the first rank of the last stage has it
        return StepOutput(logits[0] if len(logits) == 1 else torch.cat(logits, dim=1), hidden)


def _joined(outputs: list[StepOutput]) -> StepOutput:
    if len(outputs) == 1:
        return outputs[0]
    return StepOutput(torch.cat([of.logits for of in outputs]), torch.cat([of.hidden for of in outputs]))
