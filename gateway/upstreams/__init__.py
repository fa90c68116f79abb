"""OpenAI-compatible servers behind the gateway.

upstream.py sends a request and translates the client library's exceptions, connection.py is the HTTP/1.1 exchange
itself, loaded.py what a server has in memory, mock.py a scripted upstream for trials and tests. Read upstream.py first.
Uses costs, http, settings, tenants and the package cache.
"""
