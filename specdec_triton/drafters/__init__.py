"""Where drafts come from."""

from specdec_triton.drafters.base import Drafter, Drafts, DraftSession, Round, SessionOptions
from specdec_triton.drafters.cascade import Cascade
from specdec_triton.drafters.draft_model import DraftModel
from specdec_triton.drafters.eagle import EagleDrafter
from specdec_triton.drafters.layer_skip import LayerSkip
from specdec_triton.drafters.medusa import MedusaDrafter
from specdec_triton.drafters.no_draft import NoDraft
from specdec_triton.drafters.prompt_lookup import PromptLookup
from specdec_triton.drafters.suffix import SuffixDrafter
from specdec_triton.trees import DynamicTree, StaticTree

__all__ = [
    "Cascade",
    "DraftModel",
    "DraftSession",
    "Drafter",
    "Drafts",
    "DynamicTree",
    "EagleDrafter",
    "LayerSkip",
    "MedusaDrafter",
    "NoDraft",
    "PromptLookup",
    "Round",
    "SessionOptions",
    "StaticTree",
    "SuffixDrafter",
]
