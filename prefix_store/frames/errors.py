"""What is wrong with bytes that should be a frame."""


class BadFrame(Exception):
    """Bytes that are not the frame that was asked for. ``field`` is what gave them away."""

    def __init__(self, field: str, expected: object, found: object) -> None:
        self.field = field
        super().__init__(f"{field} is {_shown(found)}, expected {_shown(expected)}")


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
