"""What the semantic cache would serve of questions in the order in which they were asked.

simulation.py asks the policy its questions one after the other, report.py says how much was served and how much of it
was wrong. Read simulation.py first. Uses embedding, normal_form, policy and wording.
"""
