"""The vector index: nearest neighbours by cosine, in partitions, with expiry.

index.py is its interface; partition.py is a flat or inverted-list index, whose lists a thread makes, table.py stores
vectors, recall.py compares some searches with exact ones. Read index.py first; docs/decisions/014-vector-index.md has
the reasons. Uses no other subpackage.
"""
