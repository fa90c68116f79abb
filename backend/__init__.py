"""The decode engine: an OpenAI-compatible server of its own, reached by the gateway over HTTP."""
