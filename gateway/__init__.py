"""Keepgate's gateway: a caching proxy that speaks the APIs of OpenAI, Anthropic and Ollama.

Layers, from the top: commands, processes, api, batches, pipeline, proxy, surfaces, upstreams, http, settings, metrics,
errors. A module imports only from its own layer and those below. Uses the package cache; reaches backends over HTTP.
Read pipeline.py first: the path of a request on one screen.
"""

__version__ = "0.1.0"
