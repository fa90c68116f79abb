"""The choice of tokens where the logits are on a CUDA device: only the tokens come back to the host."""

from __future__ import annotations

import torch

from backend.kernels.sampling import sample_tokens
from backend.sequence import Sequence

_SEED_BITS = 63


def choose_on_device(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """One token for each row, under the temperature and the filters of its sequence.

    The generator of each sequence that samples gives one seed, and the device makes the uniform number from it: what
    a sequence draws does not depend on what runs beside it.

    Args:
        logits: float32 [len(sequences), vocab_size], rows contiguous.
    """
    params = [sequence.params for sequence in sequences]
    if not any(p.temperature > 0 for p in params):
        greedy: list[int] = torch.argmax(logits, dim=-1).tolist()
        return greedy
    device = logits.device
    seeds = [s.random.getrandbits(_SEED_BITS) if s.params.temperature > 0 else 0 for s in sequences]
    # Each of the four begins at 16 bytes, or the kernel would be compiled again for other alignments.
    settings = torch.zeros(4, -(-len(params) // 4) * 4)
    settings[:, : len(params)] = torch.tensor([[p.temperature, p.top_p, p.min_p, p.top_k] for p in params]).T
    temperatures, top_ps, min_ps, top_ks = settings.to(device)
    counters = torch.zeros(len(params), dtype=torch.int32, device=device)
    tokens = sample_tokens(
        logits, temperatures, top_ks.int(), top_ps, min_ps, torch.tensor(seeds, device=device), counters
    )
    chosen: list[int] = tokens.tolist()
    return chosen
