"""The tiers of the exact cache: memory.py in this process, redis_store.py shared by workers and hosts.

Both implement the protocol in store.py and pass one contract suite. breaker.py stops calls to a Redis that does not
answer: a new failure mode of Redis is handled there or in redis_store.py. Uses entries. Read store.py first.
"""
