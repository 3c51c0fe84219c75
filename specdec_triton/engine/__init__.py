"""The decoder: prompts in, rounds of draft, verify, accept, text out."""

from specdec_triton.engine.decoder import METHODS, SpeculativeDecoder
from specdec_triton.engine.request import GenerationOutput, GenerationStats, RequestHandle

__all__ = ["METHODS", "GenerationOutput", "GenerationStats", "RequestHandle", "SpeculativeDecoder"]
