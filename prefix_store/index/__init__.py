"""The index in Redis: which engine holds which KV block, never the bytes.

index.py is what the store uses; connection.py calls Redis with a deadline, not while it is unavailable (a new failure
mode of Redis is handled there and in node.py); servers.py reads its URL; writes.py queues updates; the Lua scripts
beside them run in Redis. Read index.py first; docs/decisions/017-prefix-index.md has the key layout. Uses identity.
"""
