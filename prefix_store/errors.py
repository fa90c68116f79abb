"""What can go wrong in the prefix store.

PrefixStoreError
└── IndexUnavailable   Redis did not answer in its time, refused, or is known to be ill

None of them ever reaches a request: what cannot be looked up is computed.
"""


class PrefixStoreError(Exception):
    """The root of everything this package raises on purpose."""


class IndexUnavailable(PrefixStoreError):
    """Redis could not do what it was asked; the message says why."""
