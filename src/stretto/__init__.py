"""Stretto: an inference runtime for Physical AI."""

__version__ = "0.1.0"
