"""The base of the sections in this package, which `braid.sections` shares with the kinds of algorithms."""

from braid.sections import Section

__all__ = ["Section"]
