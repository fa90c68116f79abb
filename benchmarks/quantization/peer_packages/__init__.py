"""Programs that quantise a model by another project's package, each run by a Python that has it."""
