"""The strategies that order the upstreams of a model.

registry.py makes one by its name. rotation.py, load.py, prefix_aware.py and model_aware.py are the strategies,
canary.py gives upstreams an exact share. Read registry.py first. Uses prefixes and settings.
"""
