"""`keepgate eval-pairs`: what a semantic cache would do on labelled pairs of prompts, or on a stream of questions.

rows.py reads a file. pairs.py computes what similarities and vetoes say of pairs, runs the policy and makes the report.
simulation.py, which the benchmarks use too, asks a stream, and stream_report.py makes the report of that. check.py says
for `keepgate doctor` whether the embedding model can be served here. Read pairs.py first. Uses embedding, normal_form,
policy and wording.
"""
