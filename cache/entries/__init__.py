"""What the cache stores: keys, entries, purge generations, and complete answers assembled from streams.

key.py derives the identity of a request, entry.py is the stored record and its encoding, answer.py assembles and
renders answers, generations.py decides whether a purge has invalidated an entry, outcomes.py are the results of a
lookup, checksum.py finds damaged values. Read entry.py and key.py first. Uses no other subpackage.
"""
