"""The prefix store of an engine: all tiers and peers as one.

store.py locates, restores and stores blocks; fetch_plan.py decides between fetching and computing, for which
prefill_rate.py measures what computing costs; peer_reader.py reads from other engines; owners.py publishes to the index
what the tiers hold; open_store.py builds it all from config.py. Read store.py first. Uses codecs, eviction, frames,
identity, index, peers and tiers.
"""
