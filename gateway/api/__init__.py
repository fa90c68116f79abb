"""The HTTP routes: every form of API that clients speak, the inspection API under /v1/cache, health and metrics.

handlers.py has the endpoints that answer a prompt, models and what is relayed; anthropic.py, ollama.py and responses.py
what else those APIs have; whole.py audio, images, moderations and reranking; batches.py the Files and Batch API;
page.py the page at `/`; operator/ has the operator's, openapi/ describes all of them. A handler reads the request,
calls the pipeline or the cache, and writes the response. The table of routes is in gateway/processes/routes.py. Read
handlers.py first. Uses batches, costs, http, proxy, routing, settings, surfaces, telemetry, tenants, upstreams and
the package cache.
"""
