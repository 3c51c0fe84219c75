"""Rewrites of a loaded model for fast small-row passes."""

from specdec_triton.fusion.rewrite import optimize

__all__ = ["optimize"]
