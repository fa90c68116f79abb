"""Block keys, salts, and prefixes that an operator has published."""

import hashlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.identity.encoding import encoded
from prefix_store.identity.keys import KeyChain, Published, root_key
from prefix_store.identity.salts import salted, tenant_salt
from tests.prefix_store.identity.models import fingerprint

_SECRET = b"a secret of the server"
_ROOT = root_key(fingerprint().digest)
_PROMPT = list(range(1000, 1160))  # ten blocks
_KNOWN = {
    "public": "873d3e69d1e29a4969a9bef993214d15",
    "tenant": "2ae20716bd6fe334bc0082cffb3bdcb3",
}

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=80)


def plain(root: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
    """Keys by definition."""
    keys = [root]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = b"".join(token.to_bytes(4, "little") for token in token_ids[start : start + block_size])
        keys.append(xxhash.xxh3_128_digest(keys[-1] + block))
    return keys[1:]


@given(tokens, st.integers(1, 20))
def test_keys_are_a_chain_of_hashes(token_ids: list[int], block_size: int) -> None:
    """XXH3-128 of the parent's key and the tokens as int32, little endian; lists and arrays alike."""
    chain = KeyChain(_ROOT, block_size)
    expected = plain(_ROOT, token_ids, block_size)
    assert chain.keys_of(token_ids) == chain.keys_of(np.array(token_ids, np.int32)) == expected


@given(tokens, tokens, st.integers(1, 8), st.integers(0, 4))
def test_the_next_key_needs_no_history(
    token_ids: list[int], published_ids: list[int], block_size: int, shared: int
) -> None:
    """Keys computed block by block equal those of the whole prompt, wherever the salt begins."""
    token_ids = published_ids[: shared * block_size] + token_ids
    published = Published(_ROOT, block_size)
    published.publish(published_ids)
    chain = KeyChain(_ROOT, block_size, tenant_salt(_SECRET, "a"), published)
    keys, parent = [], _ROOT
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = chain.next_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    assert keys == chain.keys_of(token_ids)


def test_a_prefix_has_the_keys_of_the_whole() -> None:
    """Prompts with a common prefix share its blocks and no others."""
    chain = KeyChain(_ROOT, 16)
    other = [*_PROMPT[:50], 7, *_PROMPT[51:]]
    keys, others = chain.keys_of(_PROMPT), chain.keys_of(other)
    assert chain.keys_of(_PROMPT[:47]) == keys[:2]
    assert keys[:3] == others[:3]
    assert not set(keys[3:]) & set(others)


def test_tenants_share_what_is_published_and_nothing_else() -> None:
    """Full blocks inside a published prefix have public keys, later blocks the tenant's own."""
    published = Published(_ROOT, 16)
    assert published.publish(_PROMPT[:40]) == 2  # and half a block, which does not count
    public = KeyChain(_ROOT, 16).keys_of(_PROMPT)
    a, b = (KeyChain(_ROOT, 16, tenant_salt(_SECRET, name), published).keys_of(_PROMPT) for name in "ab")
    assert a[:2] == b[:2] == public[:2]
    assert len({*a[2:], *b[2:], *public[2:]}) == 3 * 8


def test_a_prompt_that_leaves_a_published_prefix_is_the_tenants_from_there_on() -> None:
    """The common blocks of prompt and prefix stay public."""
    published = Published(_ROOT, 16)
    published.publish(_PROMPT)
    prompt = [*_PROMPT[:60], 5, *_PROMPT[61:]]
    public = KeyChain(_ROOT, 16).keys_of(prompt)
    own = KeyChain(_ROOT, 16, tenant_salt(_SECRET, "a"), published).keys_of(prompt)
    assert own[:3] == public[:3]
    assert not set(own[3:]) & set(public)


def test_a_tenants_keys_cannot_be_had_by_its_name() -> None:
    """A tenant's keys depend on a secret of the server, not only on the tenant's name."""
    first, second = (KeyChain(_ROOT, 16, tenant_salt(secret, "a")).keys_of(_PROMPT) for secret in (_SECRET, b"x" * 16))
    assert not set(first) & set(second)


def test_a_salt_is_hashed_in_a_domain_of_its_own() -> None:
    """The kind of the salt and a personalisation are hashed with it; an empty name is not the same as no salt."""
    salt = tenant_salt(_SECRET, "a")

    def hashed(kind: str, person: bytes) -> bytes:
        return hashlib.blake2b(encoded([_ROOT, kind, salt.value]), digest_size=16, person=person).digest()

    assert salted(_ROOT, salt) == hashed("tenant", b"kg-salt")
    assert salted(_ROOT, salt) not in (hashed("adapter", b"kg-salt"), hashed("tenant", b""))
    assert tenant_salt(_SECRET, "") != salt
    nobody = KeyChain(_ROOT, 16, tenant_salt(_SECRET, "")).keys_of(_PROMPT)
    assert not set(nobody) & set(KeyChain(_ROOT, 16).keys_of(_PROMPT))


def test_unlike_block_sizes_have_no_key_in_common() -> None:
    """The chain's keys depend on the block size."""
    assert not set(KeyChain(_ROOT, 16).keys_of(_PROMPT)) & set(KeyChain(_ROOT, 32).keys_of(_PROMPT))


def known_keys() -> dict[str, str]:
    """One key of each kind, in hex."""
    published = Published(_ROOT, 16)
    published.publish(_PROMPT[:32])
    own = KeyChain(_ROOT, 16, tenant_salt(_SECRET, "a"), published).keys_of(_PROMPT)
    return {
        "public": own[1].hex(),
        "tenant": own[-1].hex(),
    }


def test_keys_are_known() -> None:
    """The keys are the same in every version, so that stored blocks are found."""
    assert known_keys() == _KNOWN


@pytest.mark.parametrize("seed", ["0", "777"])
def test_keys_are_the_same_in_every_process(seed: str) -> None:
    """The process's hash seed does not change keys."""
    program = "from tests.prefix_store.identity.test_keys import known_keys; print(known_keys())"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(known_keys())


def test_a_salt_does_not_show_its_value() -> None:
    """Its value is not in the repr, which may be logged."""
    salt = tenant_salt(_SECRET, "a")
    assert repr(salt.value)[2:-1] not in repr(salt)
    assert repr(salt) == "Salt(…)"


def test_a_long_prompt_costs_little() -> None:
    """20,000 blocks take some ten milliseconds; the limit of a second allows for a busy machine."""
    token_ids = np.random.default_rng(0).integers(0, 50_000, 320_000, np.int32)
    begun = time.process_time()
    keys = KeyChain(_ROOT, 16, tenant_salt(_SECRET, "a")).keys_of(token_ids)
    assert time.process_time() - begun < 1
    assert len(set(keys)) == 20_000


def test_what_is_no_key_material_is_refused() -> None:
    """The message names the field and what is expected."""
    chain = KeyChain(_ROOT, 16)
    for token_ids in ([2**31] * 16, [0.5] * 16):
        with pytest.raises(ValueError, match="token_ids"):
            chain.keys_of(token_ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token_ids are int64"):
        chain.keys_of(np.arange(16))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a block has 16 tokens, not 15"):
        chain.next_key(_ROOT, [1] * 15)
    with pytest.raises(ValueError, match="block_size is 0"):
        KeyChain(_ROOT, 0)
    with pytest.raises(ValueError, match="16 random ones"):
        tenant_salt(b"guess me", "a")
    with pytest.raises(ValueError, match="16 of a fingerprint"):
        root_key(b"smollm2")
