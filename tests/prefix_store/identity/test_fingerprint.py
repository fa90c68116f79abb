"""The namespace's fingerprint."""

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.prefix_store.identity.models import fingerprint

_KNOWN = "4ec38485d8ea28eae3943f99dfdab00f"
_CHANGES: list[dict[str, Any]] = [
    {"weights": b"W" * 16},
    {"weights": b"w" * 17},
    {"tokenizer": b"T" * 16},
    {"quantisation": "Q4_1"},
    {"rope": {"theta": 500_000.0, "scaling": None}},
    {"rope": {"theta": 10_000.0, "scaling": {"factor": 8.0}}},
    {"geometry": {"layers": 30, "kv_heads": 6, "head_dim": 32}},
    {"numerics": "float32 torch"},
    {"kv_dtype": "int8"},
    {"kv_dtype": "bfloat16 fused", "numerics": "bfloat16"},
    {"layout": 2},
    {"block_size": 32},
]


def test_every_part_counts() -> None:
    """A change of any part gives another digest."""
    digests = [fingerprint(**change).digest for change in ({}, *_CHANGES)]
    assert all(one != other for one, other in itertools.combinations(digests, 2))
    assert {len(digest) for digest in digests} == {16}


def test_equal_parts_make_one_namespace() -> None:
    """The order of the names does not count."""
    geometry = {"head_dim": 64, "kv_heads": 3, "layers": 30}
    assert fingerprint(geometry=geometry).digest == fingerprint().digest


def test_the_digest_is_known() -> None:
    """The digest is the same for every version and machine, so that blocks on disk stay valid."""
    assert fingerprint().digest.hex() == _KNOWN


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_the_digest_is_the_same_in_every_process(seed: str) -> None:
    """Hash seeds differ between processes; digests do not."""
    program = "from tests.prefix_store.identity.models import fingerprint; print(fingerprint().digest.hex())"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint().digest.hex()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": b""}, "weights has 0 bytes"),
        ({"tokenizer": b"short"}, "tokenizer has 5 bytes"),
        ({"quantisation": ""}, "quantisation is empty"),
        ({"numerics": ""}, "numerics is empty"),
        ({"geometry": {}}, "geometry is empty"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_a_missing_part_is_named(change: dict[str, object], message: str) -> None:
    """A missing part raises ValueError with its name."""
    with pytest.raises(ValueError, match=message):
        fingerprint(**change)
