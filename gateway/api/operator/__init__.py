"""The operator's routes: the cache, prefix stores, virtual keys and teams, costs, and routing.

statistics.py and entries.py look into the cache, explanation.py says why a request is a miss, warming.py fills it and
purges.py empties it; requests.py has the last requests; engines.py and prefix_stores.py ask the upstreams; keys.py,
budgets.py, costs.py and routing.py are what `keepgate keys`, `keepgate costs` and a change of a strategy use. Read
entries.py first. Uses batches, costs, http, proxy, routing, settings, surfaces, telemetry, tenants, upstreams and the
package cache.
"""
