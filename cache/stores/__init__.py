"""The tiers of the exact cache: memory.py in this process, redis_store.py shared by workers and hosts.

Both implement the protocol in store.py and pass one contract suite. breaker.py stops calls to a Redis that does not
answer. A new failure mode of Redis is handled in redis_connections.py (of a connection), redis_store.py (of a
command) or breaker.py. Read store.py first. Uses entries.
"""
