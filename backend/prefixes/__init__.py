"""Prefix sharing of the engine: connects the engine's KV blocks with the prefix store.

sharing.py asks the store for a request's prefix, fetches blocks before and stores blocks after computing; audit.py
compares restored blocks with computed ones. Read sharing.py first. Uses
`engine`, `models`, `requests`, the package `prefix_store` and the package `telemetry`.
"""
