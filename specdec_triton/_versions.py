"""Versions of installed packages."""

from __future__ import annotations

import importlib.metadata


def version(package: str) -> str | None:
    """Of an installed distribution; None: it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
