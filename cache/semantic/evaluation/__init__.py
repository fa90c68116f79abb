"""`keepgate eval-pairs`: what a semantic cache would do on labelled pairs of prompts, or on a stream of questions.

rows.py reads a file. pairs.py computes what similarities and vetoes say of pairs, runs the policy and makes the report.
streams/ does the same for streams, which the benchmarks ask too. check.py says for `keepgate doctor` whether the
embedding model can be served here. Read pairs.py first. Uses embedding, policy and wording.
"""
