"""What can be wrong with what a policy is given."""

from cache.errors import CacheError


class UnusableState(CacheError):
    """Stored state or a label from elsewhere that is damaged, foreign, of another version, or not what can be.

    The message says which. A policy that raises it is as it was before; the answer to it is a cold start.
    """
