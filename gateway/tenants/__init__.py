"""Who sends a request: the credential that separates tenants, and virtual keys with their limits.

caller.py is what the rest of the gateway knows of a caller; read it first. credentials.py reads the credential from the
headers, callers.py finds the virtual key that it is. key_registry.py keeps keys and teams in Redis; key_changes.py
checks what an operator says of them. limiter.py holds requests to limits, with admit.lua and settle.lua in Redis
(docs/decisions/027-limits.md), and policies.py to the other rules of a key; budgets.py reads what is spent. Uses http,
settings and the package cache.
"""
