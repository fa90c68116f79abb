"""A model's identity, for tests."""

from typing import Any

from prefix_store.identity.fingerprint import Fingerprint


def fingerprint(**changes: Any) -> Fingerprint:
    """The fingerprint of a small model, with a test's changes."""
    parts: dict[str, Any] = {
        "weights": b"w" * 16,
        "tokenizer": b"t" * 16,
        "quantisation": "none",
        "rope": {"theta": 10_000.0, "scaling": None},
        "geometry": {"layers": 30, "kv_heads": 3, "head_dim": 64},
        "numerics": "bfloat16 fused",
        "kv_dtype": "bfloat16",
        "layout": 1,
        "block_size": 16,
    }
    return Fingerprint(**(parts | changes))
