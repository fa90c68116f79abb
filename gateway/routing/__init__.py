"""Which upstream answers a request.

router.py sends a request to one of the upstreams of its model, and to another one if that fails. strategy.py is the
contract of what chooses. Read router.py first. Uses http and upstreams.
"""
