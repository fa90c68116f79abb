"""The HTTP face of Keepgate: the request's path from a client to a cached or a computed answer."""

__version__ = "0.1.0"
