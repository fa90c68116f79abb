"""The processes of `keepgate serve`: the gateway itself, its workers and the children it starts and supervises.

app.py is the composition root: it builds the gateway from its parts, and again from new settings; routes.py has the
table of routes. serve.py runs it with its children: embedded_store.py (Valkey), local_backend.py (the decode engine),
semantic_service.py, workers.py. reload.py reads the settings again. Read app.py first. Uses api, batches, http, proxy,
costs, routing, settings, surfaces, tenants, upstreams, the package cache and the package telemetry.
"""
