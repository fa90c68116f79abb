"""The tiers of the exact cache: memory.py in this process, redis_store.py shared by workers and hosts.

Both implement the protocol in store.py and pass one contract suite. topology.py and cluster.py know which server of a
Redis has which key; breaker.py stops calls to a Redis that does not answer. A new failure mode of Redis is handled in
redis_connections.py (of a connection), topology.py (of a server), redis_store.py (of a command) or breaker.py. Read
store.py first, then redis_store.py. Uses entries.
"""
