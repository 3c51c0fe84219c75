"""Checks what a request asks for, before anything is done for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from specdec_triton._checks import require
from specdec_triton.grammar import Matcher
from specdec_triton.sampling import SamplingParams


def check_prompt(prompt: Any, vocab_size: int) -> list[int]:
    """A prompt as a list: of integers, or a tensor or array of one dimension.

    Raises:
        ValueError: no token ids, none at all, or one outside the vocabulary.
    """
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    fits = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    ids = list(values) if fits else []
    fits = fits and all(isinstance(x, Integral) and not isinstance(x, bool) for x in ids)
    require(fits, "prompt", "a list of integer token ids", repr(prompt)[:60])
    if not ids:
        raise ValueError("prompt is empty: give at least one token id")
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ValueError(f"prompt holds the token id {bad}; ids go from 0 to {vocab_size - 1}")
    return [int(x) for x in ids]


def check_prompts(prompts: Any) -> list[Any]:
    """Prompts as a list.

    Raises:
        ValueError: one prompt, or no list.
    """
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of token id lists, got {type(prompts).__name__}")
    prompts = list(prompts)
    if prompts and not isinstance(prompts[0], Iterable):
        raise ValueError("prompts must be a list of token id lists; for one prompt give [prompt]")
    return prompts


def check_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One for each of ``count`` prompts.

    Raises:
        ValueError: another number of them, or something else.
    """
    each = list(params) if isinstance(params, Sequence) else [SamplingParams() if params is None else params] * count
    if len(each) != count:
        raise ValueError(f"params must be one, or one per prompt ({count}), got {len(each)}")
    for one in each:
        require(isinstance(one, SamplingParams), "params", "SamplingParams", type(one).__name__)
    return each


def check_rules(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError: a rule names a token outside the vocabulary."""
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
        bad = next((token for token in getattr(params, name) or () if token >= vocab_size), None)
        if bad is not None:
            raise ValueError(f"{name} holds the token id {bad}; ids go from 0 to {vocab_size - 1}")


def make_matcher(params: SamplingParams) -> Matcher | None:
    """The matcher of the request's grammar.

    Raises:
        ValueError: the grammar gives none.
    """
    if params.grammar is None:
        return None
    try:
        matcher = Matcher(params.grammar())
        complete = matcher.complete
    except Exception as error:
        raise ValueError(f"grammar gave no matcher: {type(error).__name__}: {error}") from error
    require(
        not complete, "grammar", "one that makes a new matcher for each request", "a matcher whose text is complete"
    )
    return matcher


def text_limit(prompt_tokens: int, max_new_tokens: int, max_seq_len: int | None) -> int:
    """The longest that the text may become, in tokens.

    Raises:
        ValueError: the prompt alone fills the context.
    """
    if max_seq_len is None:
        return prompt_tokens + max_new_tokens
    if prompt_tokens >= max_seq_len:
        raise ValueError(f"prompt of {prompt_tokens} tokens leaves no room in the context of {max_seq_len} tokens")
    return min(prompt_tokens + max_new_tokens, max_seq_len)
