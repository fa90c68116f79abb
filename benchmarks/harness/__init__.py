"""What every figure uses: servers under test, load, and how results are kept and reported.

- `processes.py`: starts gateways, mock upstreams and reference servers, each pinned to a core. Read it first.
- `wrk.py`, `client.py`, `request_bodies.py`: the load.
- `measurement.py`, `machine.py`: the schema of `results/*.json`, and where a measurement was made.
- `report.py`, `plots.py`: the pages below `docs/benchmarks`, written from those files alone.

It imports none of the other subpackages, and nothing of what is measured.
"""
