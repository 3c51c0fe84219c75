"""Speculative decoding inside transformers' own ``generate``: ``model.generate(..., custom_generate=speculative(d))``.

``generate`` has merged its options by then: lengths, end-of-sequence ids and stopping criteria arrive as criteria,
everything that changes scores as logits processors, the batch as padded ids with a mask. Each row goes to the decoder
without its padding. The rows advance at different speeds, but criteria and streamer see what plain decoding shows them:
the whole batch, one column of new tokens at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from specdec_triton import ops
from specdec_triton._checks import require
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter
from specdec_triton.engine import METHODS, SpeculativeDecoder
from specdec_triton.engine.request import GenerationStats, RequestHandle
from specdec_triton.hf_processors import ForRow, split_rules, split_sampling
from specdec_triton.sampling import MAX_DRAFT_TOKENS, SamplingParams

_MIN_SLOTS = 8
_TARGETS: WeakKeyDictionary[Any, tuple[tuple, ModelAdapter]] = WeakKeyDictionary()  # by model; see _examined
_OWN_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)  # work on any device

# Options of a GenerationConfig that ask for another algorithm or another output, with the values that ask for nothing.
_REFUSED = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "use_mtp": (),
    "is_assistant": (),
    "output_scores": (),
    "output_logits": (),
    "output_attentions": (),
    "output_hidden_states": (),
}
_CACHES = ("cache", "past_key_values", "cache_params")
_HARMLESS = {"use_cache", "logits_to_keep", "return_dict", "tokenizer", "output_attentions", "output_hidden_states"}


def speculative(
    drafter: Drafter | None = None,
    num_draft_tokens: int = 4,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    method: str = "auto",
    exact: bool | None = None,
    backend: str | None = None,
    adaptive: bool = True,
) -> SpeculativeGenerate:
    """A decoding method for ``model.generate(**inputs, custom_generate=...)`` that drafts and verifies.

    Args:
        drafter: where drafts come from; None: plain decoding.
        num_draft_tokens: K, the most tokens drafted a round, 0 to 63.
        streamer: gets the calls that plain ``generate`` makes. Give it here only: transformers hands no decoding method
            the streamer, tokenizer, assistant_model or synced_gpus given to ``generate``.
        tokenizer, stop_strings: end a row once its text ends in one of the strings, as ``generate(stop_strings=...,
            tokenizer=...)`` does.
        method, exact, backend, adaptive: see :class:`~specdec_triton.SpeculativeDecoder`. Seeds come from torch's global
            generator, so ``torch.manual_seed`` governs sampling.

    Raises:
        ValueError: an argument out of its range; when called, an option of ``generate`` that cannot be honoured.

    Logits processors must be functions of their arguments, since they are also shown drafts that are rejected; stopping
    criteria may have state. Text that reaches the model's context ends there, with a warning. A model is examined when
    it is first used; keep the returned object to keep the decoder, and with it the pages of its cache, between calls.

    Example:
        >>> fast = speculative(PromptLookup())                                           # doctest: +SKIP
        >>> model.generate(**inputs, max_new_tokens=64, custom_generate=fast)            # doctest: +SKIP
    """
    options = {"num_draft_tokens": num_draft_tokens, "method": method, "exact": exact, "backend": backend}
    return SpeculativeGenerate(drafter, streamer, tokenizer, stop_strings, options | {"adaptive": adaptive})


class SpeculativeGenerate:
    """What :func:`speculative` returns.

    Attributes:
        stats: :class:`GenerationStats` of each row of the last call, with tokens decoded past a row's end included.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        streamer: Any,
        tokenizer: Any,
        stop_strings: str | Sequence[str] | None,
        options: dict[str, Any],
    ) -> None:
        num_draft_tokens, method = options["num_draft_tokens"], options["method"]
        if drafter is not None and not isinstance(drafter, Drafter):
            raise ValueError(f"drafter must be a Drafter such as PromptLookup(), got {type(drafter).__name__}")
        if type(num_draft_tokens) is not int or not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"num_draft_tokens must be from 0 to {MAX_DRAFT_TOKENS}, got {num_draft_tokens!r}")
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        streams = streamer is None or all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
        require(
            streams,
            "streamer",
            "None or a streamer with put() and end(), such as transformers' TextStreamer",
            repr(streamer),
        )
        strings = None if stop_strings is None else _strings(stop_strings)
        if strings is not None and tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: speculative(..., tokenizer=..., stop_strings=...)")
        self._drafter = drafter
        self._streamer = streamer
        self._stop_strings = [] if strings is None else [StopStringCriteria(tokenizer, strings)]
        self._method = method
        self._options = options
        self._decoders: WeakKeyDictionary[Any, tuple[SpeculativeDecoder, int]] = WeakKeyDictionary()
        self.stats: list[GenerationStats] = []

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """The signature of transformers' own decoding methods."""
        config = generation_config or model.generation_config
        if synced_gpus:
            raise ValueError("synced_gpus cannot be honoured by speculative()")
        if streamer is not None and self._streamer is not None:
            raise ValueError("streamer was given to generate and to speculative(); give it to speculative() alone")
        _check_config(model, config)
        mask = _check_kwargs(input_ids, model_kwargs)
        processors, sampling = split_sampling(logits_processor or [], bool(config.do_sample))
        if config.do_sample and self._method == "greedy":
            raise ValueError("do_sample=True contradicts speculative(method='greedy')")
        criteria = StoppingCriteriaList([*(stopping_criteria or []), *self._stop_strings])
        prompts = [row[real].tolist() for row, real in zip(input_ids, mask, strict=True)]
        with _examined(model, self._options["backend"]) as target:
            decoder = self._decoder(model, target, len(prompts))
            batch = _Batch(decoder, input_ids, prompts, criteria, config)
            if self._streamer is not None:
                streamer = self._streamer
                streamer.put(input_ids.cpu())
            sequences = batch.decode(processors, sampling, streamer)
            self.stats = [handle.stats for handle in batch.handles]
        if streamer is not None:
            streamer.end()
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _decoder(self, model: Any, target: ModelAdapter, rows: int) -> SpeculativeDecoder:
        """The model's decoder, with a slot for every row."""
        decoder, slots = self._decoders.get(model, (None, 0))
        if decoder is None or decoder.target is not target or slots < rows:
            slots = max(_MIN_SLOTS, 1 << (rows - 1).bit_length())
            decoder = SpeculativeDecoder(target, self._drafter, max_batch_size=slots, **self._options)
            self._decoders[model] = decoder, slots
        return decoder


@contextmanager
def _examined(model: Any, backend: str | None) -> Iterator[ModelAdapter]:
    """The model over paged KV. It is examined once, and again if it has been moved, cast or rebuilt.

    Between calls nothing that is kept refers to the model, which would keep it alive.
    """
    weight = next(model.parameters())
    state = (
        ops.resolve_backend(backend, "verify_attention", weight),
        (weight.device, weight.dtype, weight.shape),
        sum(1 for _ in model.modules()),
    )
    known, target = _TARGETS.get(model, (None, None))
    if target is None or known != state:
        target = ModelAdapter(model, backend=backend)
        target.model = None
        _TARGETS[model] = state, target
    outer, target.model = target.model, model
    try:
        yield target
    finally:
        target.model = outer


class _Batch:
    """One call: a request for each row, read column by column.

    Args:
        input_ids: ``[B,L]``, padded. prompts: its rows without padding.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        input_ids: torch.Tensor,
        prompts: list[list[int]],
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> None:
        self.handles: list[RequestHandle] = []
        self._decoder = decoder
        self._input_ids = input_ids
        self._prompts = prompts
        self._criteria = criteria
        # Plain decoding pads finished rows if any criterion looks for a token; else they go on until all have finished.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        pad = getattr(config, "_pad_token_tensor", config.pad_token_id)
        self._pad = None if pad is None else int(pad)

    def decode(self, processors: Sequence[Any], sampling: dict[str, Any], streamer: Any) -> torch.Tensor:
        """``[B,L+N]``: the padded prompts and up to N new tokens."""
        budget = self._budget()
        # Our own bookkeeping stays on the host; others' criteria may hold tensors on the device.
        on_host = all(type(criterion) in _OWN_CRITERIA for criterion in self._criteria)
        ids = self._input_ids.cpu() if on_host else self._input_ids
        going = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        try:
            self._submit(processors, sampling, budget)
            for t in range(budget):
                column = self._column(t, going.tolist())
                ids = torch.cat([ids, column[:, None].to(ids.device)], 1)
                going = going & ~self._criteria(ids, None)  # type: ignore[arg-type]
                if streamer is not None:
                    streamer.put(column)
                if not going.any():
                    break
                if self._pads:
                    for handle, goes_on in zip(self.handles, going.tolist(), strict=True):
                        if not goes_on:
                            handle.cancel()
            else:
                warnings.warn(
                    f"the text ends at the model's context of {self._decoder.max_seq_len} tokens", stacklevel=3
                )
        finally:
            for handle in self.handles:
                handle.cancel()
        return ids.to(self._input_ids.device)

    def _submit(self, processors: Sequence[Any], sampling: dict[str, Any], budget: int) -> None:
        ends = [c.eos_token_id.tolist() for c in self._criteria if type(c) is EosTokenCriteria]
        stop_ids = {int(token) for tokens in ends for token in tokens if token >= 0}
        for row, prompt in enumerate(self._prompts):
            rest: Sequence[Any] = processors
            rules: dict[str, Any] = {}
            if len(prompt) == self._input_ids.shape[1]:  # plain decoding takes padding for text
                rest, rules = split_rules(processors, len(prompt), stop_ids, budget, self._decoder.target.vocab_size)
            shown = [ForRow(rest, self._input_ids, row, len(prompt))] if rest else []
            params = SamplingParams(
                **sampling,
                **rules,
                max_new_tokens=budget,
                stop_token_ids=sorted(stop_ids),
                ignore_eos=True,
                logits_processors=shown,
            )
            self.handles.append(self._decoder.submit(prompt, params))

    def _budget(self) -> int:
        """New tokens a row: up to the shortest maximum length, or until the longest row fills the model's context."""
        limits = [c.max_length - self._input_ids.shape[1] for c in self._criteria if type(c) is MaxLengthCriteria]
        if self._decoder.max_seq_len is not None:
            limits.append(self._decoder.max_seq_len - max(map(len, self._prompts)))
        if not limits:
            raise ValueError("max_new_tokens is needed: nothing else limits the text")
        return max(min(limits), 1)

    def _column(self, t: int, going: list[bool]) -> torch.Tensor:
        """Every row's new token number ``t``: int64 ``[B]`` on the host."""
        tokens = []
        for handle, goes_on in zip(self.handles, going, strict=True):
            if goes_on or not self._pads:
                tokens.append(self._token(handle, t))
            elif self._pad is None:
                raise ValueError("pad_token_id must be set: the rows end at different lengths")
            else:
                tokens.append(self._pad)
        return torch.tensor(tokens)

    def _token(self, handle: RequestHandle, t: int) -> int:
        while len(handle.token_ids) <= t:
            if handle.output is not None:
                if handle.exception is not None:
                    raise handle.exception
                raise RuntimeError(f"decoding ended early: {handle.output.error or handle.output.finish_reason}")
            self._decoder.step()
        return handle.token_ids[t]


def _check_config(model: Any, config: GenerationConfig) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; speculative() needs a decoder-only model")
    for name, neutral in _REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value is not False and value not in neutral:
            raise ValueError(f"{name}={value!r} cannot be honoured by speculative()")
    if config.cache_implementation == "quantized":
        raise ValueError("cache_implementation='quantized' cannot be honoured: the decoder has its own cache")


def _check_kwargs(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """Which tokens are no padding, bool ``[B,L]``."""
    for name, value in model_kwargs.items():
        if name in _CACHES and value is not None and int(value.get_seq_length()) > 0:
            raise ValueError(f"{name} (past_key_values) already holds tokens, which speculative() cannot continue from")
        known = name in _HARMLESS or name in _CACHES or name in ("attention_mask", "position_ids")
        if not known and value is not None and not (isinstance(value, dict) and not value):
            raise ValueError(f"{name} cannot be honoured by speculative()")
    real = torch.ones_like(input_ids, dtype=torch.bool)
    if (mask := model_kwargs.get("attention_mask")) is not None:
        if mask.shape != input_ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"attention_mask must hold 0 and 1, like input_ids {list(input_ids.shape)}")
        real = mask.bool().to(input_ids.device)
        if not bool(real.any(1).all()):
            raise ValueError("attention_mask hides every token of a row")
    if (position_ids := model_kwargs.get("position_ids")) is not None:
        given, counted = position_ids.to(input_ids.device), real.long().cumsum(1) - 1
        if given.dim() != 2 or given.shape[1] != input_ids.shape[1] or bool(((given != counted) & real).any()):
            raise ValueError("position_ids cannot be honoured unless they count each row's tokens from 0")
    return real


def _strings(given: Any) -> list[str]:
    """One string or several, as a list."""
    strings: list[Any] = (
        [given] if isinstance(given, str) else list(given) if isinstance(given, (list, tuple, set)) else [None]
    )
    fits = all(isinstance(x, str) and x for x in strings)
    require(fits, "stop_strings", "None, a string, or a list of strings, none of them empty", repr(given))
    return strings
