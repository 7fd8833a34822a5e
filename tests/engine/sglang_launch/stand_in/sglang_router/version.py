"""The version of the stand-in."""

__version__ = "0.0.2"
