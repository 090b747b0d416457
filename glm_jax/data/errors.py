"""The error of this room."""


class DataError(ValueError):
    """Data that cannot be used. The message says what was wrong, the value seen, what would be right, and where."""
