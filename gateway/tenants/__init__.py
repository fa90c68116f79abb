"""Who sends a request: the credential that separates tenants, and virtual keys with their limits.

caller.py is what the rest of the gateway knows of a caller; read it first. credentials.py reads the credential from the
headers. Uses the package cache.
"""
