"""What an operator sees of decisions: the last ones with their verdicts, and what other budgets would have served.

decisions.py keeps the last decisions near a stored question and passes judgements on, what_if.py counts the hits and
wrong answers of other deltas. Both only watch: no decision depends on them. Read decisions.py first. Uses policy.
"""
