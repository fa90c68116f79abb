"""The process of the semantic cache: one per host, asked by the gateways over a Unix socket.

semantic_cache.py answers a lookup, learner.py learns from reported answers, log.py and sharing.py share records and
labels with other hosts through Redis. service.py builds it from config.py, server.py speaks the protocol of
cache/semantic/messages.py. May use every other room but evaluation. Read semantic_cache.py first.
"""
