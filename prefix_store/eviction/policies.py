"""The eviction policies by name. A new policy is a file beside lru.py, and a line here."""

from collections.abc import Callable, Mapping

from prefix_store.eviction.hazard import HazardPolicy
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.policy import Policy

POLICIES: Mapping[str, Callable[[], Policy]] = {"hazard": HazardPolicy, "lru": LeastRecentlyUsed}
DEFAULT_POLICY = "hazard"
"""The policy of the tiers; `keepgate replay` compares all of them."""
