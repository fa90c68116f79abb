"""Which entries there are, for who inspects the cache: no request waits for it.

entry_index.py is the interface; redis_index.py keeps it in Redis beside the entries, memory_index.py has one process
alone. fingerprint.py says what an entry remembers of its request, and in what another request differs. Read
entry_index.py first. Uses entries and stores.
"""
