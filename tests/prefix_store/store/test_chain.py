"""The identities of a sequence's blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.frames.block_id import BlockId
from prefix_store.identity.keys import KeyChain, root_key
from prefix_store.store.chain import Chain
from tests.prefix_store.tiers.blocks import NAMESPACE

_ROOT = root_key(NAMESPACE)
_SIZE = 4
_TOKENS = st.lists(st.integers(0, 100_000), max_size=60)


def blocks_of(tokens: list[int]) -> list[BlockId]:
    """Blocks added at once."""
    chain = Chain(NAMESPACE, _ROOT, _SIZE)
    whole = tokens[: len(tokens) // _SIZE * _SIZE]
    chain.extend(KeyChain(_ROOT, _SIZE).keys_of(whole), whole)
    return chain.blocks


@given(_TOKENS, st.integers(0, 15))
def test_a_chain_is_the_same_however_it_grew(tokens: list[int], cut: int) -> None:
    """Blocks are added singly or at once, from lists or arrays; a copy grows independently."""
    whole = tokens[: len(tokens) // _SIZE * _SIZE]
    keys = KeyChain(_ROOT, _SIZE).keys_of(whole)
    cut = min(cut, len(keys))
    grown = Chain(NAMESPACE, _ROOT, _SIZE)
    grown.extend(keys[:cut], whole[: cut * _SIZE])
    copied = grown.copy()
    grown.extend(keys[cut:], np.asarray(whole[cut * _SIZE :], np.int32))

    assert grown.blocks == blocks_of(tokens)
    assert copied.blocks == blocks_of(tokens)[:cut]


@given(_TOKENS)
def test_every_block_follows_the_one_before(tokens: list[int]) -> None:
    """The first one follows the root."""
    blocks = blocks_of(tokens)

    assert [block.parent for block in blocks] == [_ROOT, *(block.key for block in blocks)][: len(blocks)]
    assert all(block.namespace == NAMESPACE for block in blocks)


def test_blocks_of_the_same_tokens_have_one_digest_and_keys_of_their_own() -> None:
    """The digest depends on the tokens only, the key also on the prefix."""
    first, second, other = blocks_of([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 5])

    assert first.tokens == second.tokens != other.tokens
    assert first.key != second.key


def test_a_key_without_its_tokens_is_refused() -> None:
    """The message has the number of tokens."""
    chain = Chain(NAMESPACE, _ROOT, _SIZE)

    with pytest.raises(ValueError, match="2 blocks have 7 tokens, expected 4 in each"):
        chain.extend([bytes(16), bytes(16)], range(7))
    assert chain.blocks == []
