"""`keepgate simulate`: what a fleet of gateways, Redis nodes and backends does with recorded traffic.

command.py parses the options. traffic.py makes arrivals of a trace; run.py sends them through the queues of
gateways.py, redis_nodes.py and backends.py, which are made of servers.py. capacity.py computes the same utilisations
without queues, and from them what other rates need. figures.py has what each step takes, with its source;
report_text.py prints. Read run.py first. Uses routing, settings and the package prefix_store.
"""
