"""Environments of other libraries, and a small one of our own, each as an AgentEnv."""

from __future__ import annotations

from collections.abc import Iterable

from braid.errors import ConfigError, Problem, suggest

NO_WORDS = "needs data of nltk that is not installed; try: python -m nltk.downloader words"
"""nltk's own message is a page long."""


def refused(message: str) -> ConfigError:
    return ConfigError([Problem("env.kwargs", message, "config")])


def check_known(library: str, name: str, known: Iterable[str]) -> None:
    """Raise ConfigError if the library has no environment of this name."""
    if name not in (names := list(known)):
        raise refused(f"{library} has no environment {name!r}{suggest(name, names)}")
