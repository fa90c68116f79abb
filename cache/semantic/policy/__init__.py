"""Policies: whether a neighbour's answer is served, learned from labels.

policy.py is the interface, with the policy of other caches, a threshold. budget.py bounds the share of wrong answers of
all requests: posterior.py counts the votes of neighbours and rates an answer, groups.py knows which answers are one,
calibration.py corrects and tests the ratings by judgements, ledger.py accounts for risk, audits.py draws audits,
tallies.py estimates the share. Read policy.py and budget.py first. Uses entries and
wording.
"""
