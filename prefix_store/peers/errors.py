"""Why a peer gave no blocks.

PeerFailed
├── PeerRefused     it answered, and said no
├── PeerRestarted   it is not the one any more that was meant
└── PeerInvalid        what it sent is not what it was asked for

None of them leaves `PeerClient.read`: what a peer does not give is computed.
"""


class PeerFailed(Exception):
    """It could not be reached, or took too long, or broke off."""


class PeerRefused(PeerFailed):
    """It does not know the token, is busy, or understood nothing."""


class PeerRestarted(PeerFailed):
    """Its epoch is another one."""


class PeerInvalid(PeerFailed):
    """A frame was not that of the block, or more came than was asked for."""
