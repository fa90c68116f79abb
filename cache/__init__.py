"""Keepgate's response cache: an exact cache in memory and Redis, and a semantic one over FAISS.

Layers, from the top: semantic, exact, index, stores, entries, errors. Of the other packages it uses telemetry.
Read exact.py first, then semantic/__init__.py.
"""
