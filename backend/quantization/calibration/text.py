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
    """Windows of a text, evenly spread and without overlap.

    Args:
        path: text file, see `read_text`.
        windows: number of windows.
        tokens: length of a window. If the tokenizer begins a text with a token of its own, each window begins with it.
        seed: of each window's random offset in its share of the text.
        rows: of the embedding, to check the ids; None: no check.

    Returns:
        Token ids int64 [windows, tokens].

    Raises:
        ModelError: the file is no text, or too short for the windows; says how many tokens it has. Or a token has
            no row in the embedding.
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
