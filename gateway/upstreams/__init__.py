"""OpenAI-compatible servers behind the gateway.

router.py chooses one for a request, upstream.py sends a request and translates the client library's exceptions,
connection.py is the HTTP/1.1 exchange itself, mock.py a scripted upstream for trials and tests. Read router.py first.
Uses http, settings and the package cache.
"""
