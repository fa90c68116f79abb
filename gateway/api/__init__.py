"""The HTTP routes: OpenAI's endpoints, the inspection API under /v1/cache, health and metrics.

handlers.py has OpenAI's endpoints, admin.py and prefix_stores.py the operator's, stats.py the body of GET
/v1/cache/stats, page.py the page at `/`, batches.py the Files and Batch API. A handler reads the request, calls the
pipeline or the cache, and writes the response. The table of routes is in gateway/processes/app.py. Read handlers.py
first. Uses batches, http, proxy, settings, upstreams and the package cache.
"""
