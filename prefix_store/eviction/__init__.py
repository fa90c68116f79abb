"""Eviction policies, and the tree of chains that they order.

tree.py knows which blocks a tier holds and removes leaves when it is full; policy.py is the interface of a policy:
lru.py and hazard.py implement it. A new policy is a new file beside these two, named in the store's config. Uses no
other room. Read policy.py and tree.py first; docs/decisions/016-eviction.md has the reasons.
"""
