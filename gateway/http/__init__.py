"""HTTP for a proxy, without knowledge of the cache's steps: server, bodies, streams, Cache-Control, errors, safety.

server.py extends aiohttp's server, middleware.py turns every exception into an error response, cors.py is for apps in a
browser, sse.py splits event streams, response_writer.py writes to slow clients, json_object.py and multipart.py read
bodies. What is refused: request_head.py (ambiguous requests), hosts.py (other hosts and origins), fetched_urls.py (URLs
of private networks), memory_guard.py (too little memory); tls.py has certificates. Read middleware.py first. Uses
settings and the package cache.
"""
