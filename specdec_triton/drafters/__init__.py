"""Where drafts come from."""

from specdec_triton.drafters.base import Drafter, Drafts, DraftSession, Round, SessionOptions
from specdec_triton.drafters.draft_model import DraftModel
from specdec_triton.drafters.no_draft import NoDraft
from specdec_triton.drafters.prompt_lookup import PromptLookup

__all__ = ["DraftModel", "DraftSession", "Drafter", "Drafts", "NoDraft", "PromptLookup", "Round", "SessionOptions"]
