"""How many tokens each request drafts: the K that promises the most tokens per unit of time.

What drafts are worth follows from how earlier ones fared, what they cost from this machine's :mod:`costs <.costs>`. The
expected tokens of k drafts are 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k, where a_j is the chance that draft j is accepted given
that those before it were. Counts of drafts judged and accepted, by request and place, estimate it; old rounds fade. Where
few were judged, the estimate leans on the request's other places, and those on what the decoder saw of all requests, with
which a new request begins. Nothing here reads a clock or a value: with the same costs, the same texts give the same plans.

A request whose drafts do not pay drafts nothing, so nothing more is learnt of it. It is *probed*: once in a while one token
is drafted, so seldom that it takes 0.5 % of the time: every 10 rounds where drafts are free and a row costs 5 % of a pass,
every 110 where a drafting pass takes half as long as the target's. After a probe that succeeds the wait is an eighth of
that, and doubles with each that fails. Where not even certain drafts would pay there are no probes.

Lookup finds drafts for few requests, and the first draft of a round is the dearest: a plan of many drafts may pay and the few
of them that are found may not. So where drafts are free all are asked for, and the plan is made with what was found. A round
in which a request had no draft to choose from does not count as idle.

The constants come from simulations (constant, mixed and switching acceptance, acceptance that rises or falls with the place,
four cost curves): 96 % of the speed of a controller that is told the true chances at every moment, 98 to 99 % where they
stay the same. Nothing depends on them finely: decays from 0.85 to 0.95 and strengths from 4 to 12 are within 0.3 % of each
other. Probes of two drafts were no better than of one, and waits that ignore the costs worse where the text changes.
"""

from __future__ import annotations

import torch

from specdec_triton.engine.costs import Curve

DECAY = 0.9  # of a request's counts, in each round that adds to them
STRENGTH = 6.0  # of a prior, in judged drafts
MEMORY = 100.0  # judged drafts, of any request, after which the decoder's rate is mostly a new one
# By which drafting must promise to be faster: the best of many guesses is a hopeful one. Of 0.05, 0.1 and 0.15 measured with
# a lookup in batches of 4 and 16, 0.1 was the fastest in the one and within 1.2 % of it in the other.
MARGIN = 0.1
SHORT = 1 / 8  # of the usual wait, after a probe that succeeded


class Controllers(tuple["Controller", ...]):
    """One for each source of drafts."""

    def reset(self, slot: int) -> None:
        """A new request has the slot."""
        for controller in self:
            controller.reset(slot)

    def restart(self) -> None:
        """Forget what was seen of all requests: the next ones are decoded as the first ones were."""
        for controller in self:
            controller.restart()

    def move(self, src: int, dst: int) -> None:
        """The request of slot src goes to slot dst."""
        for controller in self:
            controller.move(src, dst)


class Controller:
    """Plans K for the requests of a round, in tensor operations alone; all state is updated in place.

    Args:
        slots: the most requests of a round. max_k: the most drafts of a request, at least 1.
        level: the rows of a pass that a draft takes. Of trees what is planned, counted and judged are levels, which take several.
        packed: True: a pass costs by the rows that are really there, so each request gets its own K. False: a pass has
            ``n * (K+1)`` rows whatever the requests draft, so one K is chosen for all.

    Attributes:
        reached, kept: float32 ``[slots,max_k]``, how often draft j was judged and accepted, decayed. A draft behind a
            rejected one was not judged.
        rate: float32 ``[]``, the share of judged drafts that were accepted, of late and over all requests.
        idle, patience: float32 ``[slots]``, rounds in which drafts could be had since drafting last paid, and the part of the
            usual wait (``Curve.wait``) after which a probe is due. If not packed ``[1]``: the requests idle together, and are
            probed in one pass.
    """

    @torch.inference_mode(False)  # must stay writable outside it
    def __init__(self, slots: int, max_k: int, device: torch.device | str, packed: bool, level: int = 1) -> None:
        self.max_k = max_k
        self._level = level
        self.packed = packed
        self._counts = torch.zeros(slots, 2, max_k, device=device)
        self.kept, self.reached = self._counts.unbind(1)
        self.rate = torch.full((), 0.5, device=device)
        self.idle = torch.zeros(slots if packed else 1, device=device)
        self.patience = torch.ones_like(self.idle)
        self._steps = torch.arange(max(slots * max_k, max_k + 1), device=device)

    def reset(self, slot: int) -> None:
        """A new request has the slot."""
        self._counts[slot] = 0
        if self.packed:
            self.idle[slot] = 0
            self.patience[slot] = 1

    def restart(self) -> None:
        """Forget what was seen of all requests: the next ones are decoded as the first ones were."""
        self._counts.zero_()
        self.rate.fill_(0.5)
        self.idle.zero_()
        self.patience.fill_(1)

    def move(self, src: int, dst: int) -> None:
        """The request of slot src goes to slot dst."""
        for state in (self._counts, self.idle, self.patience) if self.packed else (self._counts,):
            state[dst] = state[src]

    def update(self, n: int, drafted: torch.Tensor, accepted: torch.Tensor, asked: torch.Tensor | None = None) -> None:
        """Learn from a round of the slots 0 .. n-1.

        Args:
            drafted, accepted: int32 ``[n]``, drafts that were scored and that were accepted. Of a request with none drafted
                nothing is learnt.
            asked: int32 ``[n]``, drafts that were asked for; where none came back, that counts as a wrong one if a pass costs
                by what was asked for (not packed).
        """
        if asked is not None and not self.packed:
            drafted = torch.maximum(drafted, asked.clamp(max=1))
        judged = torch.minimum(drafted, accepted + 1)
        evidence = self._steps[: self.max_k] < torch.stack((accepted, judged), 1)[:, :, None]  # [n,2,max_k]
        seen = drafted > 0
        self._counts[:n].mul_(torch.where(seen, DECAY, 1.0)[:, None, None]).add_(evidence)
        kept, reached = evidence.sum((0, 2)).unbind()
        self.rate.addcdiv_(kept - self.rate * reached, reached + MEMORY)

        if not self.packed:
            drafted, accepted = drafted.sum(0, keepdim=True), accepted.sum(0, keepdim=True)
            seen = drafted > 0
        idle, patience = self.idle[:n], self.patience[:n]
        patience.mul_(torch.where(seen & (idle > 0), 2.0, 1.0)).clamp_(max=1)  # idle is 0 but after a probe
        patience.masked_fill_(accepted * 2 > drafted, SHORT)
        idle.masked_fill_(seen, 0.0)

    def plan(
        self,
        n: int,
        limits: torch.Tensor,
        fixed: torch.Tensor,
        curve: Curve,
        max_k: int | None = None,
        live: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """K of the requests in the slots 0 .. n-1, int32 ``[n]``. To be called once a round: it counts idle rounds.

        Args:
            limits: int32 ``[n]``, the most drafts of each request; 0: it drafts nothing.
            fixed: bool ``[n]``, requests that draft exactly ``limits``.
            curve: what a round of n requests costs.
            max_k: none of ``limits`` is larger, if the host knows; at least 1. Spares work.
            live: bool ``[n]``, requests that get a token of the target's own; None: those with a limit.
        """
        k = self.max_k if max_k is None else max_k
        gains = (self._acceptance(n, k) * (self._steps[:k] < limits[:, None])).cumprod(1)  # expected tokens, by draft
        given = torch.where(fixed, limits, 0)
        asking = limits > 0
        others = (asking if live is None else live).sum()
        sure = others + (gains * fixed[:, None]).sum()  # tokens that come whatever is chosen
        choose = self._choose_each if self.packed else self._choose_one
        chosen = choose(gains.masked_fill(fixed[:, None], 0.0), given, sure, curve)
        wanted = torch.where(fixed, limits, torch.minimum(chosen, limits))
        off = wanted < asking
        idle = self.idle[:n]
        if self.packed:
            idle.add_(off).masked_fill_(wanted > 0, 0.0)
        else:
            idle.add_(1).mul_(off.any())
        due = idle > self.patience[:n] * curve.wait
        return wanted + (off & due)  # until it is judged: the drafter may have to catch up

    def _acceptance(self, n: int, k: int) -> torch.Tensor:
        """The chance that draft j is accepted given that those before it were, ``[n,k]``."""
        counts = self._counts[:n, :, :k]
        kept, reached = counts.sum(2, keepdim=True).unbind(1)
        prior = torch.add(kept, self.rate, alpha=STRENGTH) / (reached + STRENGTH)
        kept, reached = counts.unbind(1)
        return torch.add(kept, prior, alpha=STRENGTH) / (reached + STRENGTH)

    def _seconds(self, curve: Curve) -> torch.Tensor:
        """Of passes of the target with 0, 1, ... drafts beyond the requests' own tokens, or levels of them."""
        return curve.target if self._level == 1 else curve.target[:: self._level]

    def _choose_each(self, gains: torch.Tensor, given: torch.Tensor, sure: torch.Tensor, curve: Curve) -> torch.Tensor:
        """K of each request that is not fixed, int32 ``[n]``.

        Gains fall with the place, so the best m drafts that need no more than d drafting passes are the m largest gains of
        the first d places, and they leave no gap. All d and m are compared.

        Args:
            gains: ``[n,k]``, 0 in fixed requests. given: ``[n]``, the drafts of fixed requests, 0 in the others.
            sure: ``[]``, tokens that the round gives without ``gains``.
        """
        k = gains.shape[1]
        gain, order = gains.flatten().sort(descending=True, stable=True)
        place, depths = order % k, self._steps[: k + 1, None]
        inside = gain * (place < depths)  # [k+1,n*k]
        rows = (inside > 0).cumsum(1) + given.sum()
        seconds = self._seconds(curve).take(rows) + torch.maximum(depths, given.amax()) * curve.draft
        seconds[0].div_(1 + MARGIN)
        best = ((sure + inside.cumsum(1)) / seconds).argmax()
        depth, last = best // len(gain), best % len(gain)
        taken = (place < depth) & (self._steps[: len(gain)] <= last)
        return taken.scatter(0, order, taken).view_as(gains).sum(1, dtype=torch.int32)

    def _choose_one(self, gains: torch.Tensor, given: torch.Tensor, sure: torch.Tensor, curve: Curve) -> torch.Tensor:
        """The best K for all, int32 ``[]``; arguments as in :meth:`_choose_each`."""
        n, k = gains.shape
        depth = torch.maximum(self._steps[: k + 1], given.amax())  # the fixed requests' rows are there in any case
        seconds = self._seconds(curve).take(depth * n) + depth * curve.draft
        tokens = sure + torch.nn.functional.pad(gains.sum(0).cumsum(0), (1, 0))
        seconds[0].div_(1 + MARGIN)
        return (tokens / seconds).argmax().int()
