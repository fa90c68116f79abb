"""What is wrong with bytes that should be a frame."""


class BadFrame(Exception):
    """Bytes that are not the frame that was asked for. ``field`` is what gave them away.

    The message goes into logs, so it has no hashes: from a digest of a few tokens the tokens can be guessed.
    """

    def __init__(self, field: str, expected: object, found: object) -> None:
        self.field = field
        is_hash = isinstance(expected, bytes) and isinstance(found, bytes)
        super().__init__(f"{field} is another one" if is_hash else f"{field} is {found}, expected {expected}")
