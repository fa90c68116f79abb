"""`keepgate doctor`: what would keep a gateway with these settings from starting, or from running well, here.

command.py lists the checks and prints what they find, execution.py runs them at the same time, each within a deadline.
A check is a function in the file of its subject that returns findings (finding.py): configuration.py, exposure.py,
listening.py, machine.py, disk.py, redis_server.py and upstreams.py; children.py runs those of the engine and of the
semantic cache, which load what the gateway does not, as processes of their own. Read command.py first. Uses http,
processes, routing, settings, upstreams and the package cache.
"""
