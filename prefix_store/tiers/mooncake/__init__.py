"""The Mooncake tier: the memory of many hosts as one pool (Qin et al., FAST '25).

mooncake_tier.py implements the tier on pool.py, which is the only file that calls Mooncake's library. settings.py
reads its configuration. Read mooncake_tier.py first. Uses codecs, eviction and frames.
"""
