"""Passes in which a row's logits do not depend on how many rows are scored with it, nor on its place among them.

Matrix libraries choose an algorithm by the number of rows, and algorithms round differently: a token scored alone and in
a verify pass of K+1 can get other bits, which flips near-ties and with them the text. There are two ways out
(:func:`kernels_backend` tells which one a device takes):

* **Kernels**, where the ops run in Triton on a GPU: products and means are ours, and invariant by construction
  (``row_invariant.py``, kernels/README.md). Passes stay as they are. On the meta device, where GPU passes are counted, too.
* **Padding**, elsewhere: passes are padded to the next row count that is *invariant*, at which the machine's own products
  give a row, at every place in the pass, the bits that it has in passes of one canonical count.

Neither is trusted: the machine is tested with the model's own weights. Of padded passes every count is, when it is first asked for;
of the kernels a few counts are at the start, and with them what does not run in kernels of ours (norms, quantized layers).

In half precision a different order of additions shows in one output of some 5,000 only, and a short pass may well show
none. So each kind of layer is tested by itself with many random rows, and then the whole model with a few tokens. What was found of a
kind of PyTorch's layers, or of ours, holds for all of that kind in a process: which algorithm a library takes follows from shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from specdec_triton._library import resolve_backend
from specdec_triton.reference.head_stats import finished
from specdec_triton.sampling import SamplingBatch, SamplingParams

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

_CANONICAL = (8, 16, 4, 32)
_KERNEL_COUNTS = (1, 2, 5, 17, 70)  # for which the kernels are tested; 70: more than one row tile
_SEARCH = 16  # how many counts from the wanted one on are tried
_STEPS = ((16, 1), (64, 4))  # up to so many rows: counts that are multiples of this
_STEP = 16  # beyond: testing a count takes longer than a few rows do, so few counts are used
_CHAIN = 5
_OUTPUTS = 2**17  # of each kind of layer are compared
# Modules of layers of which type, shape and dtype decide how they compute; a quantized one may hide more.
_BY_SHAPE = ("torch.nn.modules.", "transformers.models.", "transformers.pytorch_utils", "specdec_triton.fusion.")


class ExactnessError(ValueError):
    """Bit-exact decoding cannot be had for this model on this machine."""


def kernels_backend(backend: str | None, like: torch.Tensor) -> str | None:
    """Of the ops in exact passes over tensors like this one; None: such passes are padded."""
    if like.device.type == "cpu":
        return None
    chosen = resolve_backend(backend, "skinny_linear", like)
    return chosen if chosen == "triton" or like.is_meta else None


class InvariantRows:
    """The row counts of exact passes: with padding, each tested when it is first asked for.

    Args:
        adapter: the model.

    Raises:
        ExactnessError: the model mixes rows (experts), or the machine fails the first tests.
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
        if adapter.device.type == "meta":  # nothing can be tested
            return
        for count in _CANONICAL:
            self._tokens = (torch.arange(1, count + 1, device=adapter.device) * 104729) % adapter.vocab_size
            with adapter.invariant_products():
                layers = _layer_probes(adapter.model, count, remember=adapter.pads)
                self._probes = [*layers, _Probe(self._score, self._tokens, count)]
            if self._is_invariant(count):
                break
        else:
            raise ExactnessError("exact=True is not available: on this machine a row's logits depend on its place")
        if not adapter.pads and not all(map(self._is_invariant, _KERNEL_COUNTS)):
            raise ExactnessError(
                "exact=True is not available: on this machine a row's logits depend on the number of rows"
            )
        if not self._chain_agrees():
            raise ExactnessError("exact=True is not available: on this machine attention depends on the number of rows")
        if not adapter.pads and adapter.fixed_shapes and not self._head_agrees():
            adapter.without_head()  # then logits are written

    def pad(self, rows: int) -> int:
        """An invariant row count that holds ``rows`` rows: with padding up to 16 the smallest, beyond a round number.

        Raises:
            ExactnessError: none within reach.
        """
        if not self._adapter.pads:
            return rows
        if rows not in self._padded:
            step = next((step for most, step in _STEPS if rows <= most), _STEP)
            first = -(-rows // step) * step
            counts = range(first, first + (_SEARCH + 1) * step, step)
            found = next((n for n in counts if self._is_invariant(n)), None)
            if found is None:
                raise ExactnessError(f"exact=True: no invariant row count from {rows} to {counts[-1]}")
            self._padded[rows] = found
        return self._padded[rows]

    def _is_invariant(self, count: int) -> bool:
        if count not in self._known:
            with self._adapter.invariant_products():
                self._known[count] = all(probe.agrees(count) for probe in self._probes)
        return self._known[count]

    def _score(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[N,V]`` of N one-token texts in one pass."""
        count = len(tokens)
        cache = self._adapter.new_cache(slots=count, page_size=1, num_pages=count)
        for slot in range(count):
            cache.reserve(slot, 1)
        context = torch.zeros(count, dtype=torch.int32, device=tokens.device)
        return self._adapter.forward(tokens[:, None], cache, cache.block_table, context, rows=count)[:, 0]

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

    def _head_agrees(self) -> bool:
        """Whether the head decides as on its own logits, for any number of rows."""
        head = self._adapter.head
        if head is None:
            return True
        weight = head.linear.weight
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2 * max(_KERNEL_COUNTS), weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        greedy = SamplingBatch.from_params([SamplingParams(temperature=0)] * len(x), [0] * len(x), weight.device)

        places, backend = torch.arange(len(x), device=weight.device), self._adapter.backends.rows

        def decide(x: torch.Tensor) -> torch.Tensor:
            tokens, lse = head.sample(x, params=greedy.of(places[: len(x)]), return_lse=True, backend=backend)
            return torch.stack((tokens.double(), lse.double()), 1)

        with self._adapter.invariant_products(), torch.inference_mode():
            probe = _Probe(decide, x, max(_KERNEL_COUNTS))
            logits = finished(head.linear(x), head.scale, head.softcap)
            won = logits.gather(1, decide(x)[:, :1].long())[:, 0]
            return torch.equal(won, logits.amax(-1)) and all(map(probe.agrees, _KERNEL_COUNTS))


class ExactPasses:
    """The exact passes of one decoder, unless exactness is off or turns out not to be available.

    Args:
        exact: True: or else raise; None: if it is available; False: not at all.
        unavailable: is told, once, why it is not.
    """

    def __init__(
        self, adapter: ModelAdapter, exact: bool | None, unavailable: Callable[[ExactnessError], None]
    ) -> None:
        self._adapter = adapter
        self._exact = exact
        self._unavailable = unavailable

    def wanted(self, depends: bool) -> bool:
        """Whether a pass is to be exact. depends: a text may depend on its bits."""
        return self._exact is not False and (bool(self._exact) or depends)

    def pad(self, rows: int) -> int | None:
        """The ``rows`` of an exact pass of so many (see ``ModelAdapter.forward``); None where there is no exactness.

        Raises:
            ExactnessError: there is none, and exactness was asked for.
        """
        if self._exact is False:
            return None
        try:
            return self._adapter.invariant_rows().pad(rows)
        except ExactnessError as error:
            if self._exact:
                raise
            self._exact = False
            self._unavailable(error)
            return None


class _Probe:
    """A function of rows, and what it gives for ``inputs [R,...]`` in passes of ``canonical`` rows.

    Args:
        kind: all functions of it agree for the same counts; None: only this one is known.
    """

    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        canonical: int,
        kind: Hashable | None = None,
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._canonical = canonical
        self._agreed = {} if kind is None else _found.setdefault((kind, canonical), {})

    @cached_property
    def want(self) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([self._function(part) for part in self._inputs.split(self._canonical)])

    def agrees(self, count: int) -> bool:
        """Every row has the same bits in passes of ``count`` rows, wherever in the pass it is."""
        key = count, torch.get_num_threads(), torch.get_float32_matmul_precision()
        if key not in self._agreed:
            self._agreed[key] = self._compare(count)
        return self._agreed[key]

    def _compare(self, count: int) -> bool:
        total = len(self._inputs)
        step = torch.arange(count, device=self._inputs.device)
        with torch.inference_mode():
            for index in range(max(-(-total // count), 2)):
                order = (step + index * (count + 3)) % total
                if not torch.equal(self._function(self._inputs[order]), self.want[order]):
                    return False
        return True


# By a layer's kind and the canonical count: for another count and settings, whether it agrees.
_found: dict[Hashable, dict[tuple[int, int, str], bool]] = {}


def _layer_probes(model: torch.nn.Module, canonical: int, *, remember: bool) -> Iterator[_Probe]:
    """One of each kind and shape of the layers that turn rows into rows: linear layers and norms.

    Args:
        remember: what is found, where a layer's type, shape and dtype decide.
    """
    seen = set()
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        shape = _row_shape(layer)
        if shape is None or (key := (type(layer), *shape)) in seen:
            continue
        seen.add(key)
        width, outputs, dtype, device = shape
        rows = -(-max(_OUTPUTS // outputs, 2 * canonical) // canonical) * canonical
        x = torch.randn(rows, width, generator=generator).to(device, dtype)
        probe = _Probe(layer.forward, x, canonical, _kind(layer, key) if remember else None)
        try:
            probe.agrees(canonical)
        except (RuntimeError, TypeError, IndexError, AttributeError):
            continue  # it wants more than rows: the whole model is tested all the same
        yield probe


def _kind(layer: torch.nn.Module, key: Hashable) -> Hashable | None:
    """What decides how the layer computes; None: more than can be told here."""
    if not type(layer).__module__.startswith(_BY_SHAPE) or "forward" in vars(layer):
        return None
    weight = layer._parameters.get("weight")
    return key, getattr(layer, "bias", None) is not None, None if weight is None else weight.stride()


def _row_shape(layer: torch.nn.Module) -> tuple[int, int, torch.dtype, torch.device] | None:
    """Width, number of outputs, input dtype and device of a linear layer or a norm; None for other modules."""
    if next(layer.children(), None) is not None:
        return None
    weight: Any = layer._parameters.get("weight")
    packed = getattr(layer, "input_dtype", None)  # fusion.packed_linear
    if packed is not None:
        return int(layer.in_features), int(layer.out_features), packed, torch.device("cpu")  # type: ignore[arg-type]
    if weight is None or not weight.is_floating_point():
        return None
    if hasattr(layer, "in_features") and weight.dim() == 2:
        return weight.shape[1], weight.shape[0], weight.dtype, weight.device
    if hasattr(layer, "nf") and weight.dim() == 2:  # transformers' Conv1D, whose weight is transposed
        return weight.shape[0], weight.shape[1], weight.dtype, weight.device
    if weight.dim() == 1:
        return len(weight), len(weight), weight.dtype, weight.device
    return None
