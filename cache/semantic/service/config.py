"""The service's configuration."""

from typing import Literal

import msgspec

EMBEDDING = "embedding"
"""The judge that compares embeddings."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON on standard input.

    `redis` is a URL or "" for none, `models` the folder of the compiled encoder, `capacity` the most entries
    that are kept, `deadline` the seconds after which a question times out. `delta`, `threshold` and `audit_share` are
    shares; see SemanticSettings of the gateway. Traces go to a collector or into a file; with neither there are none.
    """

    socket: str
    redis: str
    models: str
    model: str
    model_url: str
    model_key: str
    model_prompt: str | None
    deadline: float
    policy: Literal["budget", "threshold"]
    delta: float
    threshold: float
    audit_share: float
    capacity: int
    published: tuple[str, ...]
    confirmations: int
    judge: str
    judge_model: str
    judge_key: str
    judge_share: float
    show_questions: bool = False
    encryption_keys: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: Literal["human", "json"] = "human"
    traces_endpoint: str = ""
    traces_file: str = ""
