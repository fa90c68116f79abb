"""`keepgate eval-pairs`: what a semantic cache would do on labelled pairs of prompts, or on a stream of questions.

rows.py reads a file. Of pairs: pairs.py computes similarities and vetoes and prints the report, cross_validation.py
runs the policy. Of streams, which the benchmarks ask too: streams/. check.py says for `keepgate doctor` whether the
embedding model can be served here. Read pairs.py first. Uses embedding, policy and wording.
"""
