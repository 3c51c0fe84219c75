"""The errors that callers may want to tell apart. Each is also the built-in type that it specialises."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model cannot be decoded here; the message names the reason. Raised before anything is generated."""


class ModelNotFoundError(ValueError):
    """No model of that name can be loaded."""


class BackendUnavailableError(RuntimeError):
    """A backend that was asked for by name cannot run here; it is never replaced silently."""


class OutOfPagesError(RuntimeError):
    """The KV page pool is too small for the request. Raised before any page is written."""
