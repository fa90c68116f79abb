"""What can go wrong with the embedding model.

CacheError
└── EmbeddingError
    ├── ModelUnusable       the model of the setting is not there or cannot be read: nothing semantic can start
    ├── EmbedderBusy        so many texts wait that another one would not be in time
    ├── EmbeddingFailed     the model made no vector of this text; the next one may be well
    ├── ExportUnavailable   no exported form of the model may be used: torch computes it instead
    └── NativeUnavailable   the compiled encoder does not know the model or the machine: ONNX Runtime computes it
"""

from cache.errors import CacheError


class EmbeddingError(CacheError):
    """The root of what this package raises on purpose."""


class ModelUnusable(EmbeddingError):
    """The message names the setting, what is wrong with its value, and what would be right."""


class EmbedderBusy(EmbeddingError):
    """The queue is full; the request goes on without a semantic answer."""


class EmbeddingFailed(EmbeddingError):
    """The computation failed, or its result has no direction. The message never holds the text."""


class ExportUnavailable(EmbeddingError):
    """The message says why, for the log."""


class NativeUnavailable(EmbeddingError):
    """The message says why, for the log."""
