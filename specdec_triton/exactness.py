"""Row counts at which a row's logits do not depend on how many rows are scored with it.

Matrix libraries choose an algorithm by the number of rows, and algorithms round differently: a token scored alone and in
a verify pass of K+1 can get other bits, which flips near-ties and with them the text. Instead of trusting a rule, this
tests the machine it runs on with the model's own weights: a row count is *invariant* if its rows, at every place in the
pass, equal those of one canonical count bit for bit. A pass is then padded to the next invariant count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

_CANONICAL = (8, 16, 4, 32)
_SEARCH = 16  # how many counts above the wanted one are tried
_CHAIN = 5


class ExactnessError(ValueError):
    """Bit-exact decoding cannot be had for this model on this machine."""


class InvariantRows:
    """Finds invariant row counts, each tested when it is first asked for.

    Args:
        adapter: the model.

    Raises:
        ExactnessError: the model mixes rows (experts), or no canonical count is consistent with itself.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        if adapter.observation.mixture:
            raise ExactnessError(
                "exact=True is not available for mixture-of-experts models: how many rows an expert multiplies depends"
                " on the neighbours"
            )
        self._adapter = adapter
        self._known: dict[int, bool] = {}
        self._padded: dict[int, int] = {}
        for count in _CANONICAL:
            tokens = (torch.arange(1, count + 1, device=adapter.device) * 104729) % adapter.vocab_size
            self._tokens, self._rows = tokens, self._score(tokens)
            if self._is_invariant(count):
                break
        else:
            raise ExactnessError("exact=True is not available: on this machine a row's logits depend on its place")
        if not self._chain_agrees():
            raise ExactnessError("exact=True is not available: on this machine attention depends on the number of rows")

    def pad(self, rows: int) -> int:
        """The smallest invariant row count that holds ``rows`` rows.

        Raises:
            ExactnessError: none within reach.
        """
        if rows not in self._padded:
            found = next((n for n in range(rows, rows + _SEARCH + 1) if self._is_invariant(n)), None)
            if found is None:
                raise ExactnessError(f"exact=True: no invariant row count from {rows} to {rows + _SEARCH}")
            self._padded[rows] = found
        return self._padded[rows]

    def _is_invariant(self, count: int) -> bool:
        if count not in self._known:
            self._known[count] = all(self._matches(count, shift) for shift in (0, 3))
        return self._known[count]

    def _matches(self, count: int, shift: int) -> bool:
        """Every row of a pass of ``count`` rows, whose tokens repeat the canonical ones, has the canonical bits."""
        order = (torch.arange(count, device=self._tokens.device) + shift) % len(self._tokens)
        return torch.equal(self._score(self._tokens[order]), self._rows[order])

    def _score(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[N,V]`` of N one-token texts in one pass."""
        count = len(tokens)
        cache = self._adapter.new_cache(slots=count, page_size=1, num_pages=count)
        for slot in range(count):
            cache.reserve(slot, 1)
        context = torch.zeros(count, dtype=torch.int32, device=tokens.device)
        return self._adapter.forward(tokens[:, None], cache, cache.block_table, context)[:, 0]

    def _chain_agrees(self) -> bool:
        """A chain scored in one pass and token by token."""
        tokens = self._tokens[:_CHAIN][None]
        length = tokens.shape[1]
        cache = self._adapter.new_cache(slots=1, page_size=4, num_pages=-(-length // 4))
        cache.reserve(0, length)

        def score(start: int, stop: int) -> torch.Tensor:
            context = torch.tensor([start], dtype=torch.int32, device=tokens.device)
            rows = self.pad(stop - start)
            return self._adapter.forward(tokens[:, start:stop], cache, cache.block_table, context, rows=rows)[0]

        together = score(0, length).clone()
        return torch.equal(together, torch.cat([score(t, t + 1) for t in range(length)]))
