"""Eviction policies, and the tree of chains that they order.

tree.py records which blocks a tier holds and evicts leaves when full; policy.py is the interface of a policy: lru.py
and hazard.py implement it. A new policy is a new file beside these two, listed in policies.py. Read policy.py and
tree.py first; docs/decisions/016-eviction.md has the reasons. Uses no other subpackage.
"""
