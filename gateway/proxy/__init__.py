"""The steps of the pipeline: parse, look up, share a flight, relay, record, store, replay.

inference_request.py parses a request, lookup.py and semantic_lookup.py ask the caches, single_flight.py and flight.py
share one upstream call among identical requests, relay.py sends it to the client, recorder.py assembles it for the
cache, replay.py answers a hit, fast_path.py answers it before routing. rendering.py brings an answer into the form
that a client wants, conversations.py keeps what clients continue by an id, response_headers.py has the headers of hits
and misses, deadlines.py holds requests to their own time. Of the subpackages, prompt_caches marks requests for
upstreams' own caches, predictions sends stored answers along, and metering has their limits and costs. Read
inference_request.py first.
Uses costs, http, routing, settings, surfaces, telemetry, tenants, upstreams, the package cache and the package
telemetry.
"""
