"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings

_INSIDE = ("specdec_triton", "torch", "contextlib", "concurrent", "threading")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the innermost frame that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)
