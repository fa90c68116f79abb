"""What is wrong with a folder."""


class FolderUnusable(OSError):
    """There is no folder, or it is not one of ours; the message says which and what would be right."""
