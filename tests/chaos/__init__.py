"""Faults under load: a real gateway with its upstreams and its Redis, each of which is made to fail.

`python -m tests.chaos` (`make chaos`) runs the matrix of faults and prints a table; `python -m tests.chaos.soak` runs
mixed load for half an hour and looks for leaks. Read first fault.py: what a fault is and what requests may meet
meanwhile.
"""
