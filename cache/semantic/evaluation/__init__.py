"""`keepgate eval-pairs`: what a semantic cache would do on labelled pairs of prompts.

pairs.py reads the file, verdicts.py computes similarities and guards, cross_validation.py runs the policy, report.py
prints the result; check.py says for `keepgate doctor` whether the embedding model can be served here. Read report.py
first. Uses embedding, guards, language and policy.
"""
