"""The robot side of Stretto."""

__version__ = "0.1.0"
