"""The choice of tokens where the logits are on a CUDA device: nothing here waits for them."""

from __future__ import annotations

import numpy as np
import torch

from backend.engine.sequence import Sequence
from backend.kernels.sampling import sample_tokens
from backend.kernels.transfer import to_device

_SEED_BITS = 63


def choose_on_device(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """One token for each row, under the temperature and the filters of its sequence.

    The generator of each sequence that samples gives one seed, and the device makes the uniform number from it: what
    a sequence draws does not depend on what runs beside it.

    Args:
        logits: float32 [len(sequences), vocab_size], rows contiguous.

    Returns:
        int64 [len(sequences)], on the device.
    """
    params = [sequence.params for sequence in sequences]
    if not any(p.temperature > 0 for p in params):
        return torch.argmax(logits, dim=-1)
    count, vocabulary = logits.shape
    # Four arrays of numbers and one of seeds in one copy. Each begins at 16 bytes, or the kernel would be compiled
    # again for other alignments.
    width = -(-count // 4) * 4
    packed = np.zeros((6, width), dtype=np.int32)
    packed[:3].view(np.float32)[:, :count] = np.array([(p.temperature, p.top_p, p.min_p) for p in params]).T
    packed[3, :count] = [min(p.top_k, vocabulary) for p in params]
    seeds = [s.random.getrandbits(_SEED_BITS) if s.params.temperature > 0 else 0 for s in sequences]
    packed[4:].reshape(-1).view(np.int64)[:count] = seeds
    sent = to_device(packed, logits.device)
    temperatures, top_ps, min_ps = sent[:3].view(torch.float32)
    counters = torch.zeros(count, dtype=torch.int32, device=logits.device)
    return sample_tokens(
        logits, temperatures, sent[3], top_ps, min_ps, sent[4:].reshape(-1).view(torch.int64), counters
    )
