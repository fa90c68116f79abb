"""The errors of the embedding model.

CacheError
├── ModelUnusable       the configured model is missing or cannot be read: the semantic cache does not start
├── EmbeddingFailed     no vector of this text: the model is busy, failed, or its server is down; others may work
└── NativeUnavailable   the compiled encoder lacks the model or the machine: torch computes it

Exception
└── ModelChanged        a server has another model under the name of the former one: the process starts anew
"""

from cache.errors import CacheError


class ModelUnusable(CacheError):
    """The message names the setting, what is wrong with its value, and what would be right."""


class ModelChanged(Exception):
    """The message names the model and its server. No failure of a probe, so that it ends the watch."""


class EmbeddingFailed(CacheError):
    """The text would wait too long, the computation failed, or its result has no direction. The request goes on
    without a semantic answer. The message never holds the text.
    """


class NativeUnavailable(CacheError):
    """The message says why, for the log."""
