"""The errors of the prefix store.

PrefixStoreError
└── IndexUnavailable   Redis did not reply in time, refused, or is known to be down

No request fails with one: blocks that cannot be looked up are computed.
"""


class PrefixStoreError(Exception):
    """The base class of this package's errors."""


class IndexUnavailable(PrefixStoreError):
    """A call to Redis failed; the message says why."""
