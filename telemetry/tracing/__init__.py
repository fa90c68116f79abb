"""Traces (OpenTelemetry) over HTTP hops, with W3C's `traceparent`: docs/decisions/029-traces.md.

Read span.py first: what a caller sees, and what a request that is not traced gets, without OpenTelemetry. recorded.py
makes its spans, exporters.py sends them to a collector or into a file, opening.py puts them together. timed.py keeps
the durations of a request that asks for them.
Uses no other subpackage.
"""
