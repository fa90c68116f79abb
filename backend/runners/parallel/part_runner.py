"""Runs steps on one rank's part of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from backend.engine.model_runner import StepInput, StepOutput
from backend.models.partition import partition
from backend.runners.parallel.communicator import Communicator
from backend.runners.parallel.messages import RankJob
from backend.runners.parallel.micro_batches import micro_batches


class LayersRunner(Protocol):
    """A `ModelRunner` of some layers, the torch runner or the CUDA runner."""

    name: str
    kernels: str
    weights_precision: str
    kv_precision: str
    num_blocks: int

    def layers(self, step: StepInput, received: torch.Tensor | None = None) -> torch.Tensor:
        """What leaves the last of its layers, [T, hidden]; keys and values of all rows are written.

        Args:
            received: what enters the first layer, [T, hidden], which may be changed; None: the tokens' embeddings.
        """
        ...

    def outputs(self, step: StepInput, received: torch.Tensor | None = None) -> StepOutput:
        """`layers`, and then logits and hidden states of the rows that the step names."""
        ...

    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.move_kv``."""
        ...


class PartRunner:
    """A runner on the part of the model that a rank has: some layers, and of each some heads and inner features.

    Every rank gets the same steps. Rank 0 gets logits and hidden states from the ranks of the last stage.

    Args:
        runner: of the part, with a `PartExchange`.
    """

    def __init__(self, job: RankJob, runner: LayersRunner, communicator: Communicator) -> None:
        part = self._part = job.part
        last_stage = partition(job.config, part.tensor_ranks, part.stages)[-part.tensor_ranks :]
        self._last = last_stage[0].rank
        self._widths = [len(of.vocabulary) for of in last_stage]
        self._communicator = communicator
        self._hidden_size = job.config.hidden_size
        self._dtype: torch.dtype = getattr(torch, job.settings.dtype)
        self._micro_batch_rows = job.settings.micro_batch_rows
        self.runner = runner

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput | None:
        """Computes a step on this part, and waits for it; the output is rank 0's alone.

        Raises:
            PeerLost: another rank does not take part.
        """
        part, communicator = self._part, self._communicator
        sent: list[Callable[[], None]] = []
        computed: list[StepOutput] = []
        for batch in micro_batches(step, part.stages, self._micro_batch_rows):
            received = None if part.is_first else self._received(batch)
            if not part.is_last:
                sent.append(communicator.send(self.runner.layers(batch, received), part.rank + part.tensor_ranks))
                continue
            output = self.runner.outputs(batch, received)
            logits = communicator.gather(output.logits, self._widths)
            if logits is not None:
                computed.append(StepOutput(logits, output.hidden, padding_rows=output.padding_rows))
        output_here = _joined(computed) if computed else None
        # In one piece and not for each micro-batch: between two devices one thing is sent after the other, and rank 0
        # sends its last micro-batch before it takes anything.
        if output_here is not None and part.rank:
            sent += [communicator.send(tensor, 0) for tensor in (output_here.logits, output_here.hidden)]
            output_here = None
        elif part.rank == 0 and not part.is_last:
            output_here = self._collected(step)
        for wait in sent:
            wait()
        communicator.finish()
        return output_here

    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.move_kv``; of this part alone."""
        self.runner.move_kv(moves)

    def _received(self, batch: StepInput) -> torch.Tensor:
        """What left the last layer of the stage before, [T, hidden]."""
        part = self._part
        shape = (len(batch.token_ids), self._hidden_size)
        return self._communicator.receive(shape, self._dtype, part.rank - part.tensor_ranks)

    def _collected(self, step: StepInput) -> StepOutput:
        """The output of a step from the first rank of the last stage."""
        logits, hidden = (
            self._communicator.receive((len(rows), width), torch.float32, self._last)
            for rows, width in ((step.logits_rows, sum(self._widths)), (step.hidden_rows, self._hidden_size))
        )
        return StepOutput(logits, hidden)


def _joined(outputs: list[StepOutput]) -> StepOutput:
    if len(outputs) == 1:
        return outputs[0]
    return StepOutput(torch.cat([of.logits for of in outputs]), torch.cat([of.hidden for of in outputs]))
