"""Errors of peer requests.

PeerFailed
├── PeerRefused     it refused the request
├── PeerRestarted   it has another epoch
└── PeerInvalid     its response is not what was requested

`PeerClient.read` raises none of them: blocks that a peer lacks are computed.
"""


class PeerFailed(Exception):
    """It could not be reached, was too slow, or broke off."""


class PeerRefused(PeerFailed):
    """It rejects the token or the request, or is busy."""


class PeerRestarted(PeerFailed):
    """It has another epoch."""


class PeerInvalid(PeerFailed):
    """A frame is not the block's, or more was sent than requested."""
