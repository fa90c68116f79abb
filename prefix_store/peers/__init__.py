"""KV blocks between engines over HTTP: server.py sends frames by key, client.py reads them.

protocol.py is the request, exchange.py one request and its response, health.py decides when a failing peer is
skipped. Read protocol.py first. Uses codecs, frames and tiers.
"""
