"""Speculative decoding for Hugging Face causal language models: the same text, faster.

Importing the package is cheap: torch, transformers and triton load when a name below is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_triton import models, ops, verification  # noqa: F401
    from specdec_triton.drafters import (
        Cascade,
        DraftModel,
        DynamicTree,
        EagleDrafter,
        LayerSkip,
        MedusaDrafter,
        NoDraft,
        PromptLookup,
        StaticTree,
        SuffixDrafter,
    )
    from specdec_triton.engine import SpeculativeDecoder
    from specdec_triton.engine.request import GenerationOutput
    from specdec_triton.fusion import optimize
    from specdec_triton.hf import speculative
    from specdec_triton.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Cascade",
    "DraftModel",
    "DynamicTree",
    "EagleDrafter",
    "GenerationOutput",
    "LayerSkip",
    "MedusaDrafter",
    "NoDraft",
    "PromptLookup",
    "SamplingParams",
    "SpeculativeDecoder",
    "StaticTree",
    "SuffixDrafter",
    "ops",
    "optimize",
    "speculative",
]

_MODULES = ("models", "ops", "verification")
_HOME = {
    "Cascade": "drafters",
    "DraftModel": "drafters",
    "DynamicTree": "trees",
    "EagleDrafter": "drafters",
    "GenerationOutput": "engine",
    "LayerSkip": "drafters",
    "MedusaDrafter": "drafters",
    "NoDraft": "drafters",
    "PromptLookup": "drafters",
    "SamplingParams": "sampling",
    "SpeculativeDecoder": "engine",
    "StaticTree": "trees",
    "SuffixDrafter": "drafters",
    "optimize": "fusion",
    "speculative": "hf",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"specdec_triton.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'specdec_triton' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"specdec_triton.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
