"""What the tests share: oracles in fp64, paged problems laid out as awkwardly as the contract allows, statistics, toy
models, and drafters that follow a script.

Nothing here calls an op: an oracle that shared code with what it judges would share its faults.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters.base import Drafter, Drafts, DraftSession, Round, SessionOptions
from specdec_triton.kv_cache import UNUSED, KVCache
from specdec_triton.sampling import SamplingBatch, SamplingParams

FP8 = torch.float8_e4m3fn
GARBAGE = (UNUSED, 2**31 - 1, -(2**31), 1 << 20)  # what block-table entries that nobody may read hold
SENTINEL = -777.0
NAN, INF = float("nan"), float("inf")

# Paged problems.


@dataclass
class PagedCase:
    """B requests with T new positions each, over pages in random order.

    Slots that no request uses hold NaN, and so do rows of q past query_lens; table entries past a request's length hold
    garbage.

    Attributes:
        q: ``[B,T,Hq,D]``. k_cache, v_cache: ``[P,S,Hkv,D]``, the new positions included.
        keys, values: for each request fp64 ``[context + query_len, Hkv, D]``, exactly what the cache stores.
        k_scale, v_scale: ``[Hkv]`` with an fp8 cache, else None.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """The positional arguments of ``verify_attention``."""
        return self.q, self.k_cache, self.v_cache, self.block_table, self.context_lens, self.query_lens

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


def paged_case(
    context_lens: Sequence[int],
    new: int,
    *,
    query_lens: Sequence[int] | None = None,
    q_heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    amplitude: float = 1.0,
    seed: int = 0,
) -> PagedCase:
    """A random :class:`PagedCase`; ``amplitude`` scales q, and so the scores."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    counts = [new] * len(context_lens) if query_lens is None else list(query_lens)
    q = (normal(len(counts), new, q_heads, dim) * amplitude).to(dtype)
    for b, n in enumerate(counts):
        q[b, n:] = NAN
    keys, values = ([normal(c + n, kv_heads, dim) for c, n in zip(context_lens, counts, strict=True)] for _ in range(2))
    scales: list[torch.Tensor | None] = [None, None]
    if fp8:
        scales = [torch.linspace(0.05, 2.0, kv_heads), torch.linspace(1.5, 0.01, kv_heads)]
    stored = FP8 if fp8 else dtype
    k_stored, v_stored = (
        [(x if s is None else x / s[:, None]).to(stored) for x in xs]
        for xs, s in zip((keys, values), scales, strict=True)
    )
    k_cache, v_cache, table = lay_out(k_stored, v_stored, page_size, seed=seed)
    exact = [
        [x.double() if s is None else x.double() * s.double()[:, None] for x in xs]
        for xs, s in zip((k_stored, v_stored), scales, strict=True)
    ]
    return PagedCase(
        q, k_cache, v_cache, table, _int32(context_lens), _int32(counts), exact[0], exact[1], scales[0], scales[1]
    )


def lay_out(
    keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], page_size: int, *, seed: int = 0, spare: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put each request's keys and values ``[L,Hkv,D]`` into pages in random order.

    Returns:
        k_cache, v_cache ``[P,S,Hkv,D]``, NaN where unused, and block_table, garbage where unused.
    """
    needed = [-(-len(x) // page_size) for x in keys]
    order = list(range(sum(needed) + spare))
    random.Random(seed).shuffle(order)
    shape = (len(order), page_size, *keys[0].shape[1:])
    caches = [torch.full(shape, NAN).to(keys[0].dtype) for _ in range(2)]
    table = torch.tensor([GARBAGE], dtype=torch.int32).repeat(len(keys), max(needed, default=0))[:, : max(needed) + 3]
    for b, count in enumerate(needed):
        pages = [order.pop() for _ in range(count)]
        table[b, :count] = _int32(pages)
        for cache, dense in zip(caches, (keys[b], values[b]), strict=True):
            for i, page in enumerate(pages):
                part = dense[i * page_size : (i + 1) * page_size]
                cache[page, : len(part)] = part
    return caches[0], caches[1], table.contiguous()


def attention_oracle(
    case: PagedCase,
    *,
    scale: float | None = None,
    tree_mask: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``verify_attention`` from its definition, every intermediate in ``dtype``: ``[B,T,Hq,D]``.

    In fp64 this is the truth; in the case's own dtype it is what plain PyTorch gives, the yardstick for errors.
    """
    batch, count, q_heads, dim = case.q.shape
    out = torch.zeros(batch, count, q_heads, dim, dtype=dtype)
    for b in range(batch):
        context, n = int(case.context_lens[b]), int(case.query_lens[b])
        group = q_heads // case.keys[b].shape[1]
        k, v = (x[b].to(dtype).repeat_interleave(group, 1) for x in (case.keys, case.values))
        q = case.q[b, :n].to(dtype)
        scores = torch.einsum("thd,lhd->htl", q, k) * (dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        sees = visible(
            context, n, count, None if tree_mask is None else tree_mask.expand(batch, count)[b], sliding_window
        )
        scores = scores.masked_fill(~sees, -INF)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(q_heads, n, 1)], -1)
        weights = scores.softmax(-1)[..., : context + n].nan_to_num(0.0)  # NaN: a row that sees nothing
        out[b, :n] = torch.einsum("htl,lhd->thd", weights, v)
    return out


def visible(
    context: int, n: int, count: int, tree_mask: torch.Tensor | None, sliding_window: int | None
) -> torch.Tensor:
    """Which of the context + n keys each new position sees, bool ``[n, context + n]``, from the definition."""
    rows = []
    for t in range(n):
        bits = [1 if j <= t else 0 for j in range(count)]
        if tree_mask is not None:
            mask = int(tree_mask[t]) & (2**64 - 1)
            bits = [mask >> j & 1 for j in range(64)]
        position = context + sum(bits) - 1
        row = [True] * context + [bool(bits[j]) for j in range(n)]
        if sliding_window is not None:
            row = [sees and position - sliding_window < j for j, sees in enumerate(row)]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.bool).view(n, context + n)


FAR_PAGE = 131072  # of 16 tokens, 8 KV heads and size 128: its first element is number 2**31 (faults.md F1)


def tree(*parents: int) -> torch.Tensor:
    """int64 masks of a tree given by each node's parent: (-1, 0, 0, 1) -> node 3 sees 0, 1 and itself."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return torch.tensor([mask - (mask >> 63 << 64) for mask in masks])  # bit 63 is the sign


def far_cache() -> torch.Tensor:
    """An fp8 cache ``[FAR_PAGE + 1, 16, 8, 128]``; the operating system backs only the pages that are touched."""
    return torch.empty(FAR_PAGE + 1, 16, 8, 128, dtype=torch.uint8).view(FP8)


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


# Reads and writes out of bounds.

_BAND = 64  # elements before and after a guarded tensor


def guarded(x: torch.Tensor, *, padding: int = 0) -> torch.Tensor:
    """A copy of x in the middle of a larger storage, its rows ``padding`` elements apart.

    Everything around it is a guard: NaN, in integers a large number. See :func:`assert_guards`.
    """
    row = x.shape[-1] + (padding if x.dim() > 1 else 0)
    count = math.prod(x.shape[:-1]) * row
    storage = torch.full(((count + 2 * _BAND) * x.element_size(),), _guard(x), dtype=torch.uint8, device=x.device)
    inner = storage.view(x.dtype)[_BAND : _BAND + count].view(*x.shape[:-1], row)[..., : x.shape[-1]]
    return inner.copy_(x)


def assert_guards(*tensors: torch.Tensor) -> None:
    """Nothing was written around tensors that :func:`guarded` made."""
    for x in tensors:
        storage = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        outside = torch.ones(len(storage) // x.element_size(), dtype=torch.bool, device=x.device)
        outside.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
        broken = outside & (storage.view(len(outside), -1) != _guard(x)).any(1)
        at = (broken.nonzero().flatten() - int(x.storage_offset())).tolist()
        assert not at, f"written outside a tensor of shape {list(x.shape)}, at elements {at[:8]} from its first"


def _guard(x: torch.Tensor) -> int:
    """The byte of which guards consist. As a float it is a NaN that no arithmetic gives."""
    return 0xFF if x.is_floating_point() else 0x7F


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Inside, memory that is allocated without a value holds NaN, in integers the largest: what is never written shows."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])


# Distributions.


def batch_of(rows: int, *, seed: int = 0, position: int = 0, **params: Any) -> SamplingBatch:
    """``rows`` requests with the same parameters and the seeds ``seed``, ``seed + 1``, ..."""
    one = SamplingParams(**params)
    return SamplingBatch.from_params([one] * rows, [position] * rows, seeds=range(seed, seed + rows))


def exact_probs(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> torch.Tensor:
    """The distribution that the parameters ask for, fp64 ``[V]``, by the definition."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    scaled = [x / temperature for x in logits.double().tolist()]
    kept = set(range(len(scaled)))

    def probs() -> dict[int, float]:
        highest = max(scaled[i] for i in kept)
        weights = {i: math.exp(scaled[i] - highest) for i in kept}
        total = sum(weights.values())
        return {i: w / total for i, w in weights.items()}

    if 0 < top_k < len(scaled):
        limit = sorted(scaled, reverse=True)[top_k - 1]
        kept = {i for i in kept if scaled[i] >= limit}
    if top_p < 1:
        before, limit, p = 0.0, INF, probs()
        for i in sorted(kept, key=lambda i: -scaled[i]):
            if limit == INF or before < top_p:
                limit = scaled[i]
            before += p[i]
        kept = {i for i in kept if scaled[i] >= limit}
    if min_p > 0:
        p = probs()
        kept = {i for i in kept if p[i] >= min_p * max(p.values())}
    if typical_p < 1:
        p = probs()
        entropy = -sum(x * math.log(x) for x in p.values() if x > 0)
        away = {i: abs(-math.log(x) - entropy) for i, x in p.items() if x > 0}
        mass, limit = 0.0, 0.0
        for i in sorted(away, key=lambda i: away[i]):
            if mass < typical_p or limit == 0.0:
                limit = away[i]
            mass += p[i]
        kept = {i for i in away if away[i] <= limit * (1 + 1e-9)}
    p = probs()
    return torch.tensor([p.get(i, 0.0) for i in range(len(scaled))], dtype=torch.float64)


def assert_follows(samples: torch.Tensor, probs: torch.Tensor) -> None:
    """Chi-square goodness of fit of token ids with ``probs``.

    The bound df + 10 sqrt(2 df) lies ten standard deviations out: a false alarm has probability 1e-4 at one degree of
    freedom, 2e-7 at seven. Tokens expected fewer than five times are counted together; impossible ones must not occur.
    """
    counts = torch.bincount(samples.flatten(), minlength=len(probs)).double()
    assert len(counts) == len(probs), f"ids up to {len(counts) - 1} in a vocabulary of {len(probs)}"
    impossible = (probs == 0) & (counts > 0)
    assert not impossible.any(), f"tokens of probability 0 occurred: {impossible.nonzero().flatten().tolist()}"
    expected = probs.double() / probs.double().sum() * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    df = max(len(expected) - 1, 1)
    assert statistic <= df + 10 * math.sqrt(2 * df), f"chi-square {statistic:.1f} with {df} degrees of freedom"


def unexplained(
    got: Sequence[torch.Tensor], judge: Callable[[Callable[[torch.Tensor], torch.Tensor]], Sequence[torch.Tensor]]
) -> list[int]:
    """Requests whose integers differ from the reference's though the decision is no near tie.

    Two programs that round exp, log and sums differently agree on every decision but those that hang on a few roundings.
    The rule for these: a request may differ only if the reference contradicts itself as well, once all its logits
    move by random numbers of the size 2e-5 (one of eight draws). A chip is asked for that, the interpreter is not.

    Args:
        got: integers ``[B,...]`` of the kernel.
        judge: the reference on the same requests, given what is to be done to each tensor of logits first.
    """
    want = judge(lambda x: x)

    def differing(others: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(others, want, strict=True)
        return torch.stack([(a != b).flatten(1).any(1) if a.dim() > 1 else a != b for a, b in pairs]).any(0).cpu()

    differs = differing([x.to(y.device) for x, y in zip(got, want, strict=True)])
    near = torch.zeros_like(differs)
    for seed in range(8) if differs.any() else ():

        def moved(x: torch.Tensor, seed: int = seed) -> torch.Tensor:
            generator = torch.Generator(x.device).manual_seed(seed)
            return x.float() + 2e-5 * torch.randn(x.shape, generator=generator, device=x.device)

        near |= differing(judge(moved))
    return (differs & ~near).nonzero().flatten().tolist()


# Toy models.

TOY_VOCAB = 97
_TOY = {
    "vocab_size": TOY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # with the usual 0.02, or tied embeddings, greedy text is one token repeated
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def toy_model(kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A tiny random transformers model of the given type, without an end-of-sequence token unless one is given.

    A config value None leaves that setting to the type's own default.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        name: value for name, value in {**_TOY, **config}.items() if value is not None or name == "eos_token_id"
    }
    state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).to(dtype).eval()
    finally:
        torch.set_rng_state(state)
    eos = settings["eos_token_id"]
    model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id = eos
    model.generation_config.pad_token_id = 0
    return model


@torch.inference_mode()
def toy_adapter(mode: str = "reads") -> ModelAdapter:
    """Of the toy model, decoded as on a CPU (``reads``) or as on a device (``device``: fixed shapes, one round ahead)."""
    adapter = ModelAdapter(toy_model())
    adapter.fixed_shapes = mode == "device"
    return adapter


def plain_greedy(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    """New tokens of transformers' own greedy ``generate``."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def own_logits(model: Any, text: Sequence[int]) -> torch.Tensor:
    """The module's own logits ``[L,V]`` for a text, in one pass."""
    return model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]


# Drafters.


class ScriptedDrafter(Drafter):
    """Drafts what ``script(text, limit)`` returns: a list of at most ``limit`` tokens."""

    def __init__(self, script: Callable[[list[int], int], list[int]]) -> None:
        self.script = script

    def bind(self, target: Any, options: SessionOptions) -> DraftSession:
        return _Scripted(self.script)


class _Scripted(DraftSession):
    def __init__(self, script: Callable[[list[int], int], list[int]]) -> None:
        self._script = script

    def propose(self, round_: Round) -> Drafts:
        texts = zip(round_.texts.tolist(), round_.lens.tolist(), round_.limits.tolist(), strict=True)
        rows = [self._script(text[:n], limit) if limit else [] for text, n, limit in texts]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [-1] * (longest - len(row)) for row in rows]).view(len(rows), longest).long()
        lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        return Drafts(tokens[:, : round_.k], lens.clamp(max=round_.k))


def always_right(texts: Sequence[Sequence[int]], *, offset: int = 0, vocab: int = TOY_VOCAB) -> ScriptedDrafter:
    """Knows the finished texts and drafts their next tokens, each raised by ``offset``."""

    def script(text: list[int], limit: int) -> list[int]:
        whole = next((list(t) for t in texts if list(t[: len(text)]) == text), [])
        return [(token + offset) % vocab for token in whole[len(text) : len(text) + limit]]

    return ScriptedDrafter(script)


def always_wrong(texts: Sequence[Sequence[int]], *, vocab: int = TOY_VOCAB) -> ScriptedDrafter:
    """Drafts as many tokens, each of them wrong."""
    return always_right(texts, offset=1, vocab=vocab)


def random_drafts(
    texts: Sequence[Sequence[int]] = (), *, vocab: int = TOY_VOCAB, right: float = 0.7
) -> ScriptedDrafter:
    """Drafts 0 to ``limit`` tokens, each right with probability ``right``; a function of the text alone."""
    known = always_right(texts, vocab=vocab)

    def script(text: list[int], limit: int) -> list[int]:
        rng = random.Random(repr(text))
        truth = known.script(text, limit)
        guesses = [t if rng.random() < right else rng.randrange(vocab) for t in truth]
        guesses += [rng.randrange(vocab) for _ in range(limit - len(guesses))]
        return guesses[: rng.randint(0, limit)]

    return ScriptedDrafter(script)


class ScriptedTrees(Drafter):
    """Drafts what ``script(text, limit)`` returns: at most ``limit`` nodes, each a token and the node that it follows.

    Args:
        level: see ``DraftSession.level``.
    """

    trees = True

    def __init__(self, script: Callable[[list[int], int], list[tuple[int, int]]], level: int = 1) -> None:
        self.script = script
        self.level = level

    def bind(self, target: Any, options: SessionOptions) -> DraftSession:
        session = _ScriptedTrees(self.script)
        session.level = self.level
        return session


class _ScriptedTrees(DraftSession):
    trees = True

    def __init__(self, script: Callable[[list[int], int], list[tuple[int, int]]]) -> None:
        self._script = script

    def propose(self, round_: Round) -> Drafts:
        texts = zip(round_.texts.tolist(), round_.lens.tolist(), round_.limits.tolist(), strict=True)
        rows = [self._script(text[:n], limit)[: round_.k] if limit else [] for text, n, limit in texts]
        if round_.branch is None:  # the beginnings that are chains
            rows = [row[: next((i for i, (_, parent) in enumerate(row) if parent != i), len(row))] for row in rows]
        longest = max(map(len, rows))
        padded = torch.tensor([row + [(-1, -7)] * (longest - len(row)) for row in rows]).view(len(rows), longest, 2)
        lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        tokens, parents = padded.long().unbind(2)
        return Drafts(tokens, lens, parents=None if round_.branch is None else parents)


def random_trees(
    texts: Sequence[Sequence[int]] = (), *, vocab: int = TOY_VOCAB, right: float = 0.8, level: int = 1
) -> ScriptedTrees:
    """Trees of random shapes in which a node of the right path has the right child with probability ``right``, behind wrong ones or
    before; a function of the text alone."""
    known = always_right(texts, vocab=vocab)

    def script(text: list[int], limit: int) -> list[tuple[int, int]]:
        rng = random.Random(repr(text))
        truth = known.script(text, limit)
        nodes: list[tuple[int, int]] = []
        last, depth = 0, 0  # of the right path
        for i in range(rng.randint(0, limit)):
            extends = depth < len(truth) and rng.random() < 0.5
            if extends and rng.random() < right:
                nodes.append((truth[depth], last))
                last, depth = i + 1, depth + 1
            else:
                nodes.append((rng.randrange(vocab), rng.randint(0, i)))
        return nodes

    return ScriptedTrees(script, level)


@dataclass
class Alternating(Drafter):
    """Another drafter, silent in every round whose number is not in ``on`` (rounds count modulo ``period``)."""

    drafter: Drafter
    period: int = 2
    on: tuple[int, ...] = (1,)
    rounds: int = field(default=0, init=False)

    def bind(self, target: Any, options: SessionOptions) -> DraftSession:
        session = self.drafter.bind(target, options)
        propose = session.propose

        def sometimes(round_: Round) -> Drafts:
            talks = self.rounds % self.period in self.on
            self.rounds += 1
            if not talks:
                round_.k, round_.limits = 0, torch.zeros_like(round_.limits)
            return propose(round_)

        session.propose = sometimes  # type: ignore[method-assign]
        return session


# Invariants.


def assert_pages_add_up(cache: KVCache) -> None:
    """faults.md E9: every page is free or owned, its owners are counted, the table says the same, and held texts lie in owned pages."""
    owners = Counter(page for pages in cache._owned for page in pages)
    assert sorted([*cache._free, *owners]) == list(range(cache.num_pages))
    assert cache._owners == [owners[page] for page in range(cache.num_pages)]
    for slot, (pages, row) in enumerate(zip(cache._owned, cache.block_table.tolist(), strict=True)):
        assert len(set(pages)) == len(pages)
        assert row == pages + [UNUSED] * (len(row) - len(pages))
        assert sum(len(node.chunk) for node in cache._prefixes._paths[slot]) <= cache.capacity(slot)
    held: dict[Any, set[int]] = {node: set() for node in cache._prefixes._nodes.values()}
    for slot, path in enumerate(cache._prefixes._paths):
        for node in path:
            held[node].add(slot)
    assert held == {node: node.holders for node in held}
    assert all(held.values())
