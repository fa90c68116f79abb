"""Policies: whether a neighbour's answer is served, learned from labels.

policy.py is the interface. budget.py bounds the share of wrong answers of all requests: evidence.py counts the votes of
neighbours, posterior.py rates an answer, calibration.py corrects and tests the ratings by judgements, ledger.py
accounts for risk, audits.py draws audits, bound.py estimates the share. threshold.py is the policy of other caches.
Read policy.py and budget.py first. Uses wording.
"""
