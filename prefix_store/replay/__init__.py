"""`keepgate replay`: runs recorded traffic through the eviction policies, to choose a capacity and a policy.

read.py recognises the trace format (azure.py, mooncake.py, agent.py), replay.py runs it, report_text.py prints the
report. Read replay.py first. Uses eviction.
"""
