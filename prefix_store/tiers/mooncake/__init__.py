"""Blocks in a Mooncake store: the memory of many hosts as one pool (Qin et al., FAST '25)."""
