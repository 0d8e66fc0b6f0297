"""Where braid keeps files from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder `name` in braid's folder of the user's cache, which may not exist yet. Raises RuntimeError
    for a user without a home."""
    place = os.environ.get("XDG_CACHE_HOME", "")
    # a relative one is to be ignored, says the XDG specification
    home = Path(place) if os.path.isabs(place) else Path.home() / ".cache"
    return home / "braid" / name
