"""Which upstream answers a request.

router.py sends a request to the upstreams of its model in order, with retries and hedges. table.py has the models of
the settings (models.py) and a strategy for each: strategies/, of which strategy.py is the contract; overrides.py has
those that are set while running. prefixes/ knows who holds which prompt. Read router.py first. Uses http, settings,
tenants, upstreams and the package cache.
"""
