"""The command `keepgate`: cli.py parses its options and starts the process asked for.

Nothing heavy is imported before a command is known, so that `keepgate --help` answers at once. Uses processes,
routing, settings, upstreams, the package prefix_store and the package telemetry.
"""
