"""What a codec cannot do."""


class CannotEncode(Exception):
    """These numbers cannot be written in this way; they are not stored."""
