"""The tiers: places outside an engine's memory that store KV blocks.

tier.py is their interface: host_memory.py, disk/ and mooncake/ implement it and pass one contract suite. worker.py
runs their blocking work in threads, cancellation.py cancels it. Read tier.py first. Uses codecs, eviction and frames.
"""
