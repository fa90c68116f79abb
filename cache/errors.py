"""What can go wrong in the cache.

CacheError
├── StoreUnavailable   a tier did not answer in its time, or its breaker is open
├── CorruptEntry       stored bytes are not an entry of this version
├── Undecryptable      stored bytes are encrypted with a key that is not known here, or should be and are not
└── UnstorableAnswer   an answer that is not whole, or not an answer at all
"""


class CacheError(Exception):
    """The root of everything this package raises on purpose."""


class StoreUnavailable(CacheError):
    """A tier could not answer within its deadline; the request goes on without it."""


class CorruptEntry(CacheError):
    """Stored bytes that fail their checksum or cannot be decoded."""


class Undecryptable(CacheError):
    """Stored bytes that the keys of this process do not open: as good as no stored bytes."""


class UnstorableAnswer(CacheError):
    """An answer that must not be kept; the message says why."""
