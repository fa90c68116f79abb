"""A simulated paged engine: engine.py is its scheduler, workers.py its blocks, toy_model.py what is computed."""
