"""The logits processors that transformers' ``generate`` hands over, in the decoder's terms.

What filters and penalizes row by row becomes parameters of the request, which the decoder applies on the device; everything else
stays a processor, which is shown each row as plain decoding would show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import logits_process

_WARPERS = {  # in the order in which both transformers and the decoder apply them; their parameter here and its name there
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
    TypicalLogitsWarper: ("typical_p", "mass"),
}
_STATEFUL = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    SynthIDTextWatermarkLogitsProcessor: "watermarking_config",
}
_KNOW_ALL_ROWS = (EncoderRepetitionPenaltyLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor)


def split_rules(
    processors: Sequence[Any], prompt_tokens: int, stop_ids: set[int], most: int, vocab_size: int
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Split the processors of a row without padding into the leading ones that are logit rules, as parameters, and the rest.

    Rules may come in any order: all but the repetition penalty ban tokens, and what is banned stays so.

    Args:
        prompt_tokens: of the row. stop_ids: that end it. most: new tokens that it may get.
    """
    rules: dict[str, Any] = {}
    for i, processor in enumerate(processors):
        rule = _as_rule(processor, prompt_tokens, stop_ids, most, vocab_size)
        if rule is None or (rule.keys() & rules.keys()):
            return processors[i:], rules
        rules |= rule
    return [], rules


def _as_rule(
    processor: Any, prompt_tokens: int, stop_ids: set[int], most: int, vocab_size: int
) -> dict[str, Any] | None:
    kind = type(processor)
    if kind is RepetitionPenaltyLogitsProcessor and getattr(processor, "prompt_ignore_length", None) is None:
        return {"repetition_penalty": processor.penalty} if 1e-30 < processor.penalty < 1e30 else None  # in fp32, too
    if kind is NoRepeatNGramLogitsProcessor:
        return {"no_repeat_ngram_size": processor.ngram_size}
    if kind is SuppressTokensLogitsProcessor:
        return {"banned_token_ids": [token for token in processor.suppress_tokens.tolist() if 0 <= token < vocab_size]}
    if kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
        least = processor.min_length - prompt_tokens if kind is MinLengthLogitsProcessor else processor.min_new_tokens
        from_here = kind is MinLengthLogitsProcessor or processor.prompt_length_to_skip == prompt_tokens
        if from_here and set(processor.eos_token_id.tolist()) == stop_ids:
            return {"min_new_tokens": min(max(least, 0), most)}
    return None


class ForRow:
    """Shows the batch's processors one row as plain decoding would: behind its padding, on the inputs' device.

    Args:
        input_ids: ``[B,L]``, padded. row: which of them. length: of its prompt without padding.
    """

    def __init__(self, processors: Sequence[Any], input_ids: torch.Tensor, row: int, length: int) -> None:
        self._processors = [_of_row(processor, row) for processor in processors]
        self._prompt = input_ids[row]
        self._length = length
        self._row = row
        self._rows = len(input_ids)

    def __call__(self, history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """history ``[1,length+t]``, scores ``[1,V]`` -> ``[1,V]``."""
        device = self._prompt.device
        ids = torch.cat([self._prompt, history[0, self._length :].to(device)])[None]
        out = scores.to(device)
        for processor in self._processors:
            if self._rows == 1 or _is_row_wise(processor):
                out = processor(ids, out)
            else:  # it may keep something for each row of the batch, by number
                repeated = processor(ids.repeat(self._rows, 1), out.repeat(self._rows, 1))
                out = repeated[self._row : self._row + 1]
        return out.to(scores.device)


def _of_row(processor: Any, row: int) -> Any:
    """A processor that knows the batch's rows by number, for one row."""
    if type(processor) is PrefixConstrainedLogitsProcessor:
        allowed, prompt = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, torch.Tensor):
            return RepetitionPenaltyLogitsProcessor(processor.penalty, int(ignored[row]))
    return processor


def _is_row_wise(processor: Any) -> bool:
    """Whether a processor treats a row alone as it does within a batch."""
    return type(processor).__module__ == logits_process.__name__ and not isinstance(processor, _KNOW_ALL_ROWS)


def split_sampling(logits_processor: Sequence[Any], do_sample: bool) -> tuple[list[Any], dict[str, Any]]:
    """Split what changes the scores into processors and the decoder's own sampling parameters."""
    for processor in logits_processor:
        if type(processor) in _STATEFUL:
            raise ValueError(f"{_STATEFUL[type(processor)]} cannot be honoured: its processor keeps state")
    rest = list(logits_processor)
    if rest and type(rest[-1]) is LogitNormalization:  # changes no distribution
        rest.pop()
    if not do_sample:
        return rest, {"temperature": 0.0}
    sampling: dict[str, Any] = {}
    allowed = list(_WARPERS)
    while rest and type(rest[-1]) in allowed and _is_default(rest[-1]):
        warper = rest.pop()
        name, attribute = _WARPERS[type(warper)]
        sampling[name] = getattr(warper, attribute)
        allowed = allowed[: allowed.index(type(warper))]
    return rest, sampling


def _is_default(warper: Any) -> bool:
    return getattr(warper, "filter_value", -torch.inf) == -torch.inf and getattr(warper, "min_tokens_to_keep", 1) == 1
