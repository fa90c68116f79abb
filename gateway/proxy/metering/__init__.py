"""What requests count for: the limits of their callers, what they cost, and what they save.

admissions.py admits a request by the limits of its key and team, for what it may use by estimates.py; accounting.py
says what it cost or saved once it is answered, and records.py puts that into its record. Read admissions.py first. Uses
costs, http, settings, surfaces, telemetry, tenants, upstreams and the package cache.
"""
