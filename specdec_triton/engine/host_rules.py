"""Rules that only the host can apply: grammars, and the logits processors of a request.

Both look at each row with the text before it, drafts included. A grammar's matcher walks along the drafts and back, so that its state
is that of the committed text. So are the ends that only the host can see: stop strings, and the end of a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec_triton._checks import check_tensor
from specdec_triton._upload import upload
from specdec_triton.engine.request import RequestHandle
from specdec_triton.engine.slots import Slots

Fail = Callable[[RequestHandle, str], None]


class HostRules:
    """What the host has to do in one round for those of its requests that ask for it.

    What fails in a row behind drafts ends nothing: plain decoding may never come there. The row becomes one that leaves no token,
    and if the text does come there, it is the first row of a later round.

    Args:
        handles: some have a grammar or processors. first: the slot of the round's first row.
        fail: ends a request with an error; the others go on.
    """

    def __init__(self, handles: Sequence[RequestHandle], slots: Slots, first: int, fail: Fail) -> None:
        self._handles = [(handle.slot - first, handle) for handle in handles if handle.slot is not None]
        self._slots = slots
        self._fail = fail

    def masks(self, tokens: torch.Tensor, lens: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        """What the grammars allow in each row: int32 ``[n,K+1,ceil(V/32)]``; None if nobody has one.

        Args:
            tokens: int64 ``[n,K]``. lens: int32 ``[n]``.
        """
        constrained = [(row, handle, handle.matcher) for row, handle in self._handles if handle.matcher is not None]
        if not constrained:
            return None
        n, k = tokens.shape
        masks = torch.full((n, k + 1, (vocab_size + 31) // 32), -1, dtype=torch.int32)
        drafts, drafted = tokens.tolist(), lens.tolist()
        for row, handle, matcher in constrained:
            try:
                matcher.walk(drafts[row][: drafted[row]], masks[row])
            except Exception as error:
                handle.exception = error
                self._fail(handle, f"the grammar failed: {type(error).__name__}: {error}")
        return upload(masks, torch.int32, tokens.device)

    def process(self, tokens: torch.Tensor, lens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The logits ``[n,K+1,V]`` after the requests' own processors."""
        processed = [(row, handle) for row, handle in self._handles if handle.params.logits_processors]
        if not processed:
            return logits
        logits = logits.float().clone()
        drafted = lens.tolist()
        for row, handle in processed:
            assert handle.slot is not None
            text, name, t = self._slots.texts[handle.slot, : handle.length], "", 0
            try:
                for t in range(drafted[row] + 1):
                    history = torch.cat([text, tokens[row, :t]])[None]
                    scores = logits[row, t][None]
                    for processor in handle.params.logits_processors:
                        name = getattr(processor, "__name__", type(processor).__name__)
                        scores = processor(history, scores)
                        check_tensor(f"the logits of {name}", scores, (1, logits.shape[-1]), logits)
                    logits[row, t] = scores[0]
            except Exception as error:
                if t > 0:
                    logits[row, t] = float("-inf")
                    continue
                handle.exception = error
                self._fail(handle, f"the logits processor {name} failed: {type(error).__name__}: {error}")
        return logits


def end_of_text(handle: RequestHandle, tokens: Sequence[int]) -> tuple[int | None, str | None]:
    """How many of the new tokens are the text's last ones, for a reason that only the host can see (None: it goes on), and
    what went wrong if something did.

    A request's matcher accepts the tokens up to there.
    """
    stop = None
    if handle.stop_strings is not None:
        early = max(handle.params.min_new_tokens - len(handle.token_ids) - 1, 0)
        stop = handle.stop_strings.first(handle.token_ids, tokens, early)
    end = None if stop is None else stop + 1
    if handle.matcher is None:
        return end, None
    for i, token in enumerate(tokens[:end]):
        try:
            accepted = handle.matcher.accept(token)
        except Exception as error:
            handle.exception = error
            return i, f"the grammar failed: {type(error).__name__}: {error}"
        if not accepted:
            return i, f"the grammar refuses the token {token}, which its mask had allowed"
        if handle.matcher.complete:
            return i + 1, None
    return end, None
