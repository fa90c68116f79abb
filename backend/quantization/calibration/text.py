"""Windows of tokens out of a text file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backend.errors import ModelError
from backend.text.text_file import read_text
from backend.text.token_ids import unknown_token

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def token_windows(
    tokenizer: Tokenizer, path: Path, windows: int, tokens: int, seed: int = 0, rows: int | None = None
) -> torch.Tensor:
    """Stretches of a text, evenly spread over all of it; none overlaps another.

    Args:
        path: of the text, see `read_text`.
        windows: how many.
        tokens: of a window. Where the tokenizer begins a text with a token of its own, each window begins with it.
        seed: of where in its share of the text a window begins.
        rows: of the embedding that the ids are for; None: ids are not compared with it.

    Returns:
        Token ids int64 [windows, tokens].

    Raises:
        ModelError: the file is no text, or too short for so many windows; says how many it has tokens for. Or the
            tokenizer makes a token of it that has no row.
    """
    text = read_text(path)
    begin = tokenizer.encode("").ids[:1]
    own = tokens - len(begin)
    listed = tokenizer.encode(text, add_special_tokens=False).ids
    if rows is not None and (unknown := unknown_token(tokenizer, [*begin, *listed], rows)) is not None:
        raise ModelError(f"{path}: {unknown}")
    ids = torch.tensor(listed, dtype=torch.int64)
    if len(ids) < windows * own:
        raise ModelError(
            f"{path}: {len(ids):,} tokens, and {windows} windows of {tokens} need {windows * own:,}; "
            f"expected a longer text, or fewer or shorter windows"
        )
    share = len(ids) // windows
    first = torch.randint(share - own + 1, (windows,), generator=torch.Generator().manual_seed(seed))
    places = (torch.arange(windows) * share + first).unsqueeze(1) + torch.arange(own)
    return torch.cat([torch.tensor(begin, dtype=torch.int64).expand(windows, -1), ids[places]], dim=1)
