"""Marks by which upstreams' own prompt caches are used, where the setting `prompt_cache.mode` is `mark`.

Read planner.py first: what is marked, for which upstream. prefixes.py counts how often each prefix comes again, and has
the rule by which a breakpoint pays; keys.py makes a `prompt_cache_key`. prompt.py reads the prefixes of a body and puts
marks into its text.
Uses routing, settings and upstreams.
"""
