"""The process of the semantic cache: one per host, called by gateways over a Unix socket.

semantic_cache.py answers a lookup, learner.py learns from reported answers, record_log.py and sharing.py share records
and labels with other hosts through Redis. service.py builds it from config.py, server.py serves the protocol of
cache/semantic/messages.py. Read semantic_cache.py first. Uses embedding, entries, index, inspection, judge,
normal_form, policy, stores, wording and the package telemetry.
"""
