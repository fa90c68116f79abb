"""Settings of `keepgate serve`: their types and defaults, and where they are read from.

settings.py declares every setting; sources.py merges YAML file, environment and command line, and writes the error
messages; prefix_defaults.py and telemetry_defaults.py complete those of the backend; encryption_keys.py reads the
keys of stored values. Read settings.py first. Uses the package cache.
"""
