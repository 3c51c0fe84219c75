"""The page pool: every page is free or owned at all times (faults.md E9), and every slot reads what was written for it.

Keys say whose they are: a number that depends on all tokens up to theirs within a prompt, so that requests which begin
alike may share them, and on the request behind it.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import takewhile

import pytest
import torch

from specdec_triton.errors import OutOfPagesError
from specdec_triton.kv_cache import UNUSED, KVCache, LayerShape
from specdec_triton.testing import FP8, assert_pages_add_up

LAYERS = ((2, 16), (1, 24))
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pool(num_pages=8, slots=3, page_size=4, layers=LAYERS, dtype=torch.float32, device="cpu", **options):
    return KVCache(
        [LayerShape(*shape) for shape in layers],
        slots=slots,
        page_size=page_size,
        num_pages=num_pages,
        dtype=dtype,
        device=torch.device(device),
        **options,
    )


def bits(x):
    return x.view(torch.uint8) if x.dtype == FP8 else x


def pools(cache):
    """Every layer's keys and values; fp8 as bytes."""
    return [bits(x) for index in range(len(LAYERS)) for x in cache.layer(index)]


def codes_of(prompt):
    codes = [0]
    for token in prompt:
        codes.append((codes[-1] * 31 + token + 1) % 2**20)
    return codes[1:]


def places(cache, slot, start, stop):
    position = torch.arange(start, stop)
    return cache.block_table[slot].cpu().long()[position // cache.page_size], position % cache.page_size


def stored(codes, index, dtype):
    """What pool ``index`` holds for ``codes``, ``[n,1,1]``."""
    codes = torch.tensor(codes) + index * 2**20
    return (codes % 251).to(torch.uint8)[:, None, None] if dtype == torch.uint8 else codes.to(dtype)[:, None, None]


def write(cache, slot, start, codes):
    at = places(cache, slot, start, start + len(codes))
    for index, x in enumerate(pools(cache)):
        x[at] = stored(codes, index, x.dtype).to(x.device).expand(-1, *x.shape[2:])


def assert_holds(cache, slot, codes):
    at = places(cache, slot, 0, len(codes))
    for index, x in enumerate(pools(cache)):
        assert (x[at].cpu() == stored(codes, index, x.dtype)).all(), f"slot {slot}, pool {index}"


def start(cache, slot, prompt, chunk, *, total=None):
    """Adopt what there is, process the rest of the prompt and publish it; returns how much was adopted."""
    covered = cache.adopt(slot, prompt, chunk)
    cache.reserve(slot, total or len(prompt))
    write(cache, slot, covered, codes_of(prompt)[covered:])
    cache.publish(slot, prompt, chunk)
    return covered


def text(length, seed=0):
    return random.Random(seed).choices(range(3), k=length)


def test_shapes_by_layer():
    cache = pool()
    assert [x.shape for x in cache.layer(0)] == [(8, 4, 2, 16)] * 2
    assert [x.shape for x in cache.layer(1)] == [(8, 4, 1, 24)] * 2
    assert (cache.num_pages, cache.free_pages) == (8, 8)


@pytest.mark.parametrize(
    ("page_size", "tokens", "pages"), [(4, 0, 0), (4, 1, 1), (4, 4, 1), (4, 5, 2), (1, 7, 7), (48, 49, 2)]
)
def test_pages_for(page_size, tokens, pages):
    cache = pool(num_pages=10, page_size=page_size)
    assert cache.pages_for(tokens) == pages
    cache.reserve(1, tokens)
    assert cache.capacity(1) == pages * page_size
    assert cache.free_pages == 10 - pages


def test_reserve_is_idempotent_and_never_shrinks():
    cache = pool()
    cache.reserve(0, 5)
    pages = cache.block_table[0].tolist()
    cache.reserve(0, 5)
    cache.reserve(0, 1)
    assert cache.block_table[0].tolist() == pages
    assert_pages_add_up(cache)


def test_low_pages_first():
    """So that a request's pages lie side by side, and a pass on the CPU reads them as one slice."""
    cache = pool()
    for slot in range(3):
        cache.reserve(slot, 5)
    cache.release(2)
    cache.release(0)
    cache.reserve(2, 12)
    assert cache.block_table.tolist() == [[UNUSED] * 3, [2, 3, UNUSED], [0, 1, 4]]
    assert cache.block_table.dtype == torch.int32
    cache = pool(num_pages=4, growable=True)
    cache.reserve(0, 8)
    cache.reserve(1, 20)
    assert cache._owned[1] == [2, 3, 4, 5, 6]


def test_out_of_pages_changes_nothing():
    cache = pool(num_pages=4)
    cache.reserve(0, 9)
    before = cache.block_table.clone()
    assert not cache.can_reserve(1, 5)
    assert cache.can_reserve(1, 4)
    assert not cache.can_reserve(1, 4, spare=1)
    with pytest.raises(OutOfPagesError, match="num_pages"):
        cache.reserve(1, 5)
    with pytest.raises(OutOfPagesError):
        cache.reserve(0, 40)
    assert torch.equal(cache.block_table, before)
    assert_pages_add_up(cache)


def test_trim_and_release():
    cache = pool()
    cache.reserve(0, 12)
    cache.trim(0, 12)
    cache.trim(0, 20)  # nothing beyond: nothing to do
    assert cache.capacity(0) == 12
    cache.trim(0, 5)
    assert cache.block_table[0].tolist() == [0, 1, UNUSED]
    assert_pages_add_up(cache)
    cache.release(0)
    cache.release(0)
    assert cache.free_pages == 8
    assert_pages_add_up(cache)


def test_growth_keeps_what_is_stored():
    cache = pool(num_pages=1, growable=True)
    cache.reserve(0, 4)
    write(cache, 0, 0, [5, 6, 7, 8])
    assert cache.can_reserve(1, 10**6, spare=10**6)
    cache.reserve(1, 30)
    assert cache.num_pages == 9
    assert_holds(cache, 0, [5, 6, 7, 8])
    assert all((x[1:] == 0).all() for x in pools(cache))
    assert_pages_add_up(cache)


def test_growth_from_nothing_is_geometric():
    """Many small reservations replace the pool and the table a few times, not each time."""
    cache = pool(num_pages=0, growable=True)
    sizes, widths = set(), set()
    for tokens in range(1, 400):
        cache.reserve(0, tokens)
        sizes.add(cache.num_pages)
        widths.add(cache.block_table.shape[1])
    assert len(sizes) < 15
    assert len(widths) < 15
    assert_pages_add_up(cache)


def test_growth_that_fails_makes_the_pool_a_fixed_one(monkeypatch):
    """Its requests make room for one another then; what is stored stays."""
    cache = pool(num_pages=1, growable=True)
    cache.reserve(0, 4)
    write(cache, 0, 0, [5, 6, 7, 8])
    new_zeros, left = torch.Tensor.new_zeros, [True, False]

    def until_memory_ends(x, *shape):
        if left.pop(0):
            return new_zeros(x, *shape)
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", until_memory_ends)
        with pytest.raises(OutOfPagesError, match="no memory for 8 more pages of 4 tokens"):
            cache.reserve(1, 30)
    assert (cache.num_pages, cache.free_pages, cache.capacity(1), cache.version) == (1, 0, 0, 1)
    assert not cache.can_reserve(1, 30)
    assert_holds(cache, 0, [5, 6, 7, 8])
    assert_pages_add_up(cache)


def test_version_tells_of_every_replaced_tensor():
    """A captured graph holds on to the tensors that it was captured with."""
    cache = pool(num_pages=2, growable=True)
    seen = {}
    for tokens in range(1, 200, 3):
        cache.reserve(tokens % 2, tokens)
        held = [x.data_ptr() for x in (*pools(cache), cache.block_table)]
        assert seen.setdefault(cache.version, held) == held
    assert len(seen) > 5


@pytest.mark.parametrize(("max_tokens", "width"), [(0, 1), (1, 1), (33, 9)])
def test_max_tokens_makes_the_table_wide_at_once(max_tokens, width):
    cache = pool(num_pages=20, max_tokens=max_tokens)
    table = cache.block_table
    assert table.shape == (3, width)
    cache.reserve(0, max_tokens)
    assert cache.block_table is table
    assert cache.version == 0


def test_columns_are_few_and_enough():
    cache = pool(num_pages=11)
    cache.reserve(0, 44)
    assert [cache.columns(tokens) for tokens in (0, 1, 4, 5, 9, 16, 17, 33, 44)] == [1, 1, 1, 2, 4, 4, 8, 11, 11]


@pytest.mark.parametrize("page_size", [1, 3, 16, 48])
@pytest.mark.parametrize("chunk", [7, 16, 128])
def test_adopting_shares_full_pages_and_copies_the_last(chunk, page_size):
    cache = pool(num_pages=2000 // page_size, slots=2, page_size=page_size)
    prompt = text(3 * chunk + 2)
    start(cache, 0, prompt[: 2 * chunk + 1], chunk)
    free = cache.free_pages
    assert cache.adopt(1, prompt, chunk) == 2 * chunk
    full, rest = divmod(2 * chunk, page_size)
    first, second = cache._owned
    assert second[:full] == first[:full]
    assert len(second) == full + bool(rest)
    assert set(second[full:]).isdisjoint(first)
    assert cache.free_pages == free - bool(rest)
    assert_holds(cache, 1, codes_of(prompt)[: 2 * chunk])
    assert_pages_add_up(cache)


@pytest.mark.parametrize(("page_size", "chunk"), [(16, 16), (48, 128), (544, 128), (3, 7), (1, 7)])
def test_nobody_writes_into_the_others_text(page_size, chunk):
    """Owner and adopter go on behind the prefix, drafts up to the end of their pages included."""
    cache = pool(num_pages=1000 // page_size + 6, slots=2, page_size=page_size)
    prompt = text(chunk + 3)
    both = [codes_of(prompt), codes_of(prompt)]
    for slot in range(2):
        assert start(cache, slot, prompt, chunk) == slot * chunk
    for slot in (0, 1, 0):
        both[slot] = both[slot][: len(prompt)] + [1000 * slot + i for i in range(2 * page_size)]
        cache.reserve(slot, len(both[slot]))
        write(cache, slot, len(prompt), both[slot][len(prompt) :] + [77] * (-len(both[slot]) % page_size))
        assert_holds(cache, 0, both[0])
        assert_holds(cache, 1, both[1])


@pytest.mark.parametrize(("length", "covered"), [(0, 0), (1, 0), (7, 0), (8, 7), (14, 7), (15, 14), (40, 14)])
def test_a_token_is_left_to_process(length, covered):
    cache = pool(num_pages=20)
    start(cache, 0, text(20), 7)
    assert cache.adopt(1, text(40)[:length] if length <= 20 else text(20) + [0] * 20, 7) == covered


def test_prompts_that_begin_otherwise_share_nothing():
    """The second chunk is the same, but its keys are not."""
    cache = pool(num_pages=20)
    start(cache, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert cache.adopt(1, [0, 2, 3, 4, 5, 6, 7, 8, 9], 4) == 0
    assert cache.adopt(1, [5, 6, 7, 8, 9], 4) == 0
    assert cache.adopt(1, [1, 2, 3, 4, 0, 6, 7, 8, 9], 4) == 4


def test_the_lowest_slot_gives():
    """Two that processed the same prompt side by side; which of them is asked does not depend on who came first."""
    cache = pool(num_pages=20)
    for slot in (2, 0):
        cache.reserve(slot, 9)
    for slot in (2, 0):
        cache.publish(slot, text(9), 4)
    cache.adopt(1, text(9), 4)
    assert cache._owned == [[3, 4, 5], [3, 4], [0, 1, 2]]


def test_published_as_the_prompt_is_processed():
    class Watched(list):
        looked_at = 0

        def __getitem__(self, index):
            self.looked_at += len(range(*index.indices(len(self))))
            return super().__getitem__(index)

    cache = pool(num_pages=20)
    prompt = Watched(text(20))
    cache.reserve(0, 20)
    for done in range(21):
        cache.publish(0, Watched.__getitem__(prompt, slice(done)), 6)
        assert cache.adopt(1, text(20), 6) == done // 6 * 6
        cache.release(1)
    prompt.looked_at = 0
    cache.publish(0, prompt, 6)
    assert prompt.looked_at == 0


@pytest.mark.parametrize("page_size", [4, 16])
def test_forgotten_with_the_last_owner(page_size):
    """faults.md E9: the adopter keeps what the first owner gave back, and nothing outlives both."""
    cache = pool(num_pages=20, slots=4, page_size=page_size)
    prompt = text(40)
    start(cache, 0, prompt[:21], 6)
    start(cache, 1, prompt, 6)
    cache.release(0)
    assert_holds(cache, 1, codes_of(prompt))
    assert start(cache, 2, prompt[:33], 6) == 30  # past what the first owner had
    cache.release(1)
    assert_holds(cache, 2, codes_of(prompt[:33]))
    assert start(cache, 3, prompt, 6) == 30
    cache.release(2)
    cache.release(3)
    assert cache.free_pages == cache.num_pages
    assert cache.adopt(0, prompt, 6) == 0
    assert_pages_add_up(cache)


def test_trimmed_keys_are_no_longer_shared():
    cache = pool(num_pages=20)
    start(cache, 0, text(20), 6)
    cache.trim(0, 13)
    write(cache, 0, 13, [99] * 3)
    assert cache.adopt(1, text(20), 6) == 12
    cache.trim(0, 12)  # between two pages: nothing that is shared can be written over
    for tokens in (11, 5):
        with pytest.raises(ValueError, match=f"cannot be cut to {tokens} tokens: it shares the page"):
            cache.trim(0, tokens)
    cache.release(1)
    assert cache.adopt(1, text(20), 6) == 12
    assert_holds(cache, 0, codes_of(text(20)[:12]))
    assert_pages_add_up(cache)


def test_a_fixed_pool_adopts_what_needs_no_page():
    cache = pool(num_pages=5, page_size=4)
    start(cache, 0, text(20), 6)
    before = cache.block_table.clone()
    assert cache.adopt(1, text(20), 6) == 0  # 18 tokens: half a page to copy, and none is free
    assert torch.equal(cache.block_table, before)
    assert_pages_add_up(cache)
    assert cache.adopt(1, text(14), 6) == 12
    assert cache.free_pages == 0
    assert_pages_add_up(cache)


def test_a_growing_pool_grows_for_the_copied_page():
    cache = pool(num_pages=5, page_size=4, growable=True)
    start(cache, 0, text(20), 6)
    assert cache.adopt(1, text(20), 6) == 18
    assert cache.version == 2  # the table, the pool
    assert_holds(cache, 1, codes_of(text(20)[:18]))
    assert_pages_add_up(cache)


def test_drafts_past_a_page_have_room():
    """faults.md E7: 14 tokens, 4 drafts and one more, in pages of 16; one of them shared."""
    cache = pool(num_pages=6, page_size=16)
    start(cache, 0, text(18), 16)
    assert start(cache, 1, text(17), 16) == 16
    cache.reserve(2, 14 + 4 + 1)
    cache.reserve(1, 30 + 4 + 1)
    assert [cache.capacity(slot) for slot in range(3)] == [32, 48, 32]
    assert cache.free_pages == 0  # one is shared; 1, 2 and 2 are not
    assert_pages_add_up(cache)


def test_move_copies_no_key():
    cache = pool(num_pages=20)
    start(cache, 0, text(20), 6)
    before, row = [x.clone() for x in pools(cache)], cache.block_table[0].tolist()
    cache.move(0, 2)
    assert cache.block_table.tolist() == [[UNUSED] * 5, [UNUSED] * 5, row]
    assert all(torch.equal(x, old) for x, old in zip(pools(cache), before, strict=True))
    assert_pages_add_up(cache)
    assert cache.adopt(1, text(20), 6) == 18  # from where it is now
    cache.move(0, 0)
    cache.reserve(2, 24)
    cache.publish(2, text(24), 6)
    assert_pages_add_up(cache)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_swapped_keys_come_back_bit_for_bit(dtype, device):
    """faults.md E10, for every bit pattern, NaN included; into other pages, of which others wrote in between."""
    cache = pool(num_pages=9, page_size=16, layers=((2, 16),), dtype=dtype, device=device)
    for x in cache.layer(0):
        x.view(torch.uint8).copy_(torch.randint(0, 256, x.view(torch.uint8).shape, dtype=torch.uint8))
    cache.reserve(0, 40)
    cache.reserve(1, 60)
    at = places(cache, 1, 0, 50)
    want = [x.view(torch.uint8)[at].clone() for x in cache.layer(0)]
    swapped = cache.swap_out(1, 50)
    assert (cache.capacity(1), cache.free_pages) == (0, 6)
    assert all(x.device.type == "cpu" and x.is_pinned() == (device == "cuda") for x in swapped.pages)
    cache.reserve(2, 20)
    for x in cache.layer(0):
        x.view(torch.uint8)[:] = 0x55
    cache.swap_in(1, swapped)
    assert cache._owned[1] == [5, 6, 7, 8]
    at = places(cache, 1, 0, 50)
    assert all(torch.equal(x.view(torch.uint8)[at], old) for x, old in zip(cache.layer(0), want, strict=True))
    assert all((x.view(torch.uint8)[:5] == 0x55).all() for x in cache.layer(0))
    assert_pages_add_up(cache)


def test_swapping_in_needs_pages():
    cache = pool(num_pages=4)
    cache.reserve(0, 12)
    swapped = cache.swap_out(0, 9)
    cache.reserve(1, 8)
    before = cache.block_table.clone()
    with pytest.raises(OutOfPagesError):
        cache.swap_in(0, swapped)
    assert torch.equal(cache.block_table, before)
    cache.release(1)
    cache.swap_in(0, swapped)
    assert cache.capacity(0) == 12
    cache.swap_in(1, cache.swap_out(2, 0))
    assert_pages_add_up(cache)


def alike(a, b):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Request:
    """What a request has processed: codes of its prompt, then its own."""

    def __init__(self, prompt):
        self.prompt, self.codes, self.published, self.swapped = prompt, [], 0, None


class Traffic:
    """Requests that come, go on, move, make room and leave at random, and what the cache must say of them."""

    def __init__(self, cache, chunk, seed):
        self.cache, self.chunk, self.rng = cache, chunk, random.Random(seed)
        self.slots = [None] * len(cache.block_table)
        self.away = []
        self.seen = Counter()

    def step(self):
        slot = self.rng.randrange(len(self.slots))
        request = self.slots[slot]
        if request is None:
            act = self.rng.choice([self.arrive, self.arrive, self.come_back, self.move_here])
        else:
            acts = [self.process, self.publish, self.trim, self.swap_out, self.leave]
            act = self.rng.choices(acts, [10, 6, 1, 1, 1])[0]
        try:
            act(slot, request)
            self.seen[act.__name__] += 1
        except OutOfPagesError:
            assert not self.cache.growable
            self.seen["refused"] += 1

    def arrive(self, slot, _):
        prompt = text(3 * self.chunk, seed=self.rng.randrange(2))[: self.rng.randrange(self.chunk, 4 * self.chunk)]
        prompt += self.rng.choices(range(3), k=self.rng.randrange(1, self.chunk))
        known = [other.prompt[: other.published] for other in self.slots if other is not None]
        want = max((alike(prompt[:-1], held) // self.chunk * self.chunk for held in known), default=0)
        if want % self.cache.page_size and not self.cache.can_reserve(slot, 1):
            want = 0
        assert self.cache.adopt(slot, prompt, self.chunk) == want
        request = self.slots[slot] = Request(prompt)
        request.codes, request.published = codes_of(prompt)[:want], want
        self.seen["shared"] += want > 0

    def process(self, slot, request):
        """The next chunk of the prompt, or a few tokens behind it, and drafts that come to nothing."""
        done, drafts = len(request.codes), self.rng.randrange(5)
        if done < len(request.prompt):
            codes = codes_of(request.prompt)[done : (done // self.chunk + 1) * self.chunk]
        else:
            codes = self.rng.choices(range(2**20), k=self.rng.randrange(1, 5))
        self.cache.reserve(slot, done + len(codes) + drafts)
        write(self.cache, slot, done, codes + [7] * drafts)
        request.codes += codes

    def publish(self, slot, request):
        known = min(len(request.codes), len(request.prompt))
        self.cache.publish(slot, request.prompt[:known], self.chunk)
        request.published = known // self.chunk * self.chunk

    def trim(self, slot, request):
        tokens = self.rng.randrange(len(request.codes) + 1)
        pages = self.cache._owned[slot]
        last = tokens // self.cache.page_size
        if tokens % self.cache.page_size and self.cache._owners[pages[last]] > 1:
            with pytest.raises(ValueError, match="shares the page"):
                self.cache.trim(slot, tokens)
            return
        self.cache.trim(slot, tokens)
        del request.codes[tokens:]
        request.published = min(request.published, tokens // self.chunk * self.chunk)

    def leave(self, slot, _):
        self.cache.release(slot)
        self.slots[slot] = None

    def move_here(self, slot, _):
        src = self.rng.randrange(len(self.slots))
        if src != slot:
            self.cache.move(src, slot)
            self.slots[slot], self.slots[src] = self.slots[src], None

    def swap_out(self, slot, request):
        request.swapped = self.cache.swap_out(slot, len(request.codes))
        request.published = 0
        self.away.append(request)
        self.slots[slot] = None

    def come_back(self, slot, _):
        if self.away:
            request = self.away[-1]
            self.cache.swap_in(slot, request.swapped)
            self.slots[slot] = self.away.pop()

    def check(self):
        assert_pages_add_up(self.cache)
        free = torch.tensor(self.cache._free, dtype=torch.int64)
        for x in pools(self.cache):
            x[free] = 255 if x.dtype == torch.uint8 else torch.nan  # what is free may be written over
        for slot, request in enumerate(self.slots):
            if request is not None:
                assert_holds(self.cache, slot, request.codes)


@pytest.mark.parametrize(
    ("dtype", "growable"), [(torch.float32, False), (torch.float32, True), (FP8, False)], ids=["fixed", "grows", "fp8"]
)
@pytest.mark.parametrize("page_size", [1, 3, 16, 48])
@pytest.mark.parametrize("chunk", [7, 16, 128])
def test_random_traffic(chunk, page_size, dtype, growable):
    """faults.md E9, E10: after every operation, each page is free or owned and each slot reads its own values."""
    num_pages = 1 if growable else max(5 * chunk // page_size, 3)
    cache = pool(num_pages=num_pages, slots=4, page_size=page_size, dtype=dtype, growable=growable)
    traffic = Traffic(cache, chunk, seed=page_size)
    for _ in range(300):
        traffic.step()
        traffic.check()
    assert min(traffic.seen[act] for act in ("arrive", "come_back", "move_here", "shared", "trim", "leave")) > 0
    assert (traffic.seen["refused"] > 0) == (not growable)
    for slot in range(4):
        cache.release(slot)
    assert cache.free_pages == cache.num_pages
    assert not cache._prefixes._nodes
    assert_pages_add_up(cache)


def life(cache):
    """Every operation once; what the host decided after each."""
    for change in (
        lambda: cache.reserve(0, 20),
        lambda: cache.publish(0, text(20), 6),
        lambda: cache.adopt(1, text(20), 6),
        lambda: cache.reserve(1, 90),
        lambda: cache.trim(1, 30),
        lambda: cache.move(0, 2),
        lambda: cache.swap_in(0, cache.swap_out(1, 25)),
        lambda: cache.release(2),
        lambda: cache.adopt(1, text(20), 6),
    ):
        done = change()
        yield done, [list(pages) for pages in cache._owned], cache.num_pages, cache.free_pages, cache.version


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_nothing_is_read_back(dtype):
    """The host decides alone: on the meta device, where reading raises, it decides the same."""
    caches = [pool(num_pages=2, growable=True, dtype=dtype, device=device) for device in ("cpu", "meta")]
    for on_cpu, on_meta in zip(*map(life, caches), strict=True):
        assert on_meta == on_cpu
    assert caches[1].swap_out(0, 25).pages[0].device.type == "meta"


def test_changes_inside_inference_mode_can_be_undone_outside():
    """A decoder steps in inference mode, and is cancelled from outside it."""
    cache = pool(num_pages=0, growable=True)
    with torch.inference_mode():
        *_, swapped = *life(cache), cache.swap_out(0, 25)
    cache.release(1)
    cache.swap_in(2, swapped)
    start(cache, 0, text(90), 6)
    cache.adopt(1, text(90), 6)
    assert_pages_add_up(cache)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pool(page_size=0), "page_size must be at least 1"),
        (lambda: pool(num_pages=-1), "num_pages must be at least 0"),
        (lambda: published().trim(0, -1), "tokens must be at least 0"),  # faults.md E5
        (lambda: published().move(1, 0), "slot 0 must be empty, it owns 5 pages"),
        (lambda: published().adopt(0, text(20), 6), "slot 0 must be empty"),
        (lambda: published().swap_in(0, published().swap_out(0, 9)), "slot 0 must be empty"),
        (lambda: published().swap_out(0, 21), "slot 0 has no 21 tokens: its pages hold 20"),
        (lambda: published().publish(0, text(24), 6), "slot 0 cannot share 24 tokens: its pages hold 20"),
        (lambda: published().publish(0, text(20), 5), "shares chunks of 6 tokens, got chunks of 5"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def published():
    cache = pool(num_pages=20)
    start(cache, 0, text(20), 6)
    return cache
