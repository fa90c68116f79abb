"""HTTP for a proxy, without knowledge of the cache's steps: server, bodies, streams, Cache-Control, errors.

server.py extends aiohttp's server, middleware.py turns every exception into an error response, cors.py is for apps in a
browser, sse.py splits event streams, response_writer.py writes to slow clients, json_object.py and multipart.py read
bodies. Read middleware.py first. Uses the package cache.
"""
