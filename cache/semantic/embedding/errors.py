"""The errors of the embedding model.

CacheError
└── EmbeddingError
    ├── ModelUnusable       the configured model is missing or cannot be read: the semantic cache does not start
    ├── EmbedderBusy        so many texts wait that another would be late
    ├── EmbeddingFailed     the model gave no vector of this text, or its server is down; others may work
    └── NativeUnavailable   the compiled encoder lacks the model or the machine: torch computes it

Exception
└── ModelChanged            a server has another model under the name of the former one: the process starts anew
"""

from cache.errors import CacheError


class EmbeddingError(CacheError):
    """The base class of this package's errors."""


class ModelUnusable(EmbeddingError):
    """The message names the setting, what is wrong with its value, and what would be right."""


class ModelChanged(Exception):
    """The message names the model and its server. No failure of a probe, so that it ends the watch."""


class EmbedderBusy(EmbeddingError):
    """The queue is full; the request goes on without a semantic answer."""


class EmbeddingFailed(EmbeddingError):
    """The computation failed, or its result has no direction. The message never holds the text."""


class NativeUnavailable(EmbeddingError):
    """The message says why, for the log."""
