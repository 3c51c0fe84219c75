"""A round never makes the host wait for the device, and does the same when it is captured once and replayed.

Shown without a GPU: on the meta device, where reading a value raises; and on CPU tensors with ``RecordedGraph``, in whose
replays every value that the host read while capturing stays what it was. On a GPU the same runs under
``torch.cuda.set_sync_debug_mode("error")`` in ``test_gpu.py``.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton.adapter import ModelAdapter
from specdec_triton.engine.graphs import StepGraphs
from specdec_triton.engine.round import COLUMNS
from specdec_triton.recorded_graph import RecordedGraph
from specdec_triton.testing import plain_greedy, toy_model
from specdec_triton.tracing import Trace, tensors

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {"llama": LlamaConfig, "gemma3": Gemma3TextConfig}


def on_meta(kind="llama", layers=2):
    with torch.device("meta"):
        config = MODELS[kind](**SIZES, num_hidden_layers=layers)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


DRAFTERS = {
    "none": NoDraft,
    "lookup": PromptLookup,
    "model": lambda: DraftModel(on_meta(layers=1)),
}
PARAMS = {
    "greedy": [SamplingParams(temperature=0)],
    "coupled": [SamplingParams(seed=3)],
    "rejection": [SamplingParams()],
    "filtered": [SamplingParams(top_k=5, top_p=0.9), SamplingParams(min_p=0.1)],
    "mixed": [SamplingParams(temperature=0), SamplingParams(seed=3, top_p=0.5), SamplingParams(), SamplingParams(num_draft_tokens=0)],
    "ruled": [
        SamplingParams(temperature=0, repetition_penalty=1.1, logit_bias={3: 1.0}, no_repeat_ngram_size=3),
        SamplingParams(frequency_penalty=0.5, typical_p=0.9, logprobs=4, min_new_tokens=5, stop_token_ids=[4]),
        SamplingParams(seed=3),
    ],
}  # fmt: skip


class Zeros:
    """In place of the ring of log-probabilities."""

    def push(self, report):
        self.shape = report.shape
        return self

    def wait(self):
        return torch.zeros(self.shape, dtype=torch.int64)


class Everything:
    """In place of the ring: reports that all drafts were accepted, and that all are wanted again."""

    def push(self, report):
        self.shape = report.shape
        return self

    def wait(self):
        rows, columns = self.shape
        report = torch.full((rows, columns), 7)
        tokens = columns - len(COLUMNS)
        facts = {"count": tokens, "drafted": tokens - 1, "accepted": tokens - 1, "reason": 0, "wanted": 4, "failed": 0}
        for name, value in facts.items():
            report[:, COLUMNS.index(name)] = value
        report[:, COLUMNS.index("seen")] = 1 << 20
        return report


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_step_waits_for_the_device(drafter, params, adaptive):
    """faults.md G2: whole steps of the decoder, prompts included; all that goes to the device are the requests."""
    decoder = SpeculativeDecoder(on_meta(), DRAFTERS[drafter](), max_batch_size=8, adaptive=adaptive)
    decoder._loop._ring, decoder._loop._details = Everything(), Zeros()
    handles = [decoder.submit([3, 5, 7] * (i + 1), params[i % len(params)]) for i in range(6)]
    with Trace():
        for _ in range(3):
            assert decoder.step()
    assert all(handle.decoding for handle in handles)
    assert all(len(handle.token_ids) >= 3 for handle in handles)
    with Trace(strict=True) as trace:  # no new request, no new page: nothing goes to the device either
        decoder._loop.rounds.run(decoder._loop._make_room())
    assert trace.uploads == 0
    assert trace.launches > 100


class Widths(TorchDispatchMode):
    """Which tensors with as many columns as there are ids come into being."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_row = [x for x in tensors(out) if x.dim() > 1 and x.shape[-1] == SIZES["vocab_size"] and not x._is_view()]
        self.found += [(str(func), *x.shape) for x in is_row]
        return out


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PARAMS)
def test_who_writes_logits(drafter, name):
    """Nobody whose rounds need a few numbers of each row; drafts with probabilities, filters, rules and mixed methods do."""
    decoder = SpeculativeDecoder(on_meta(), DRAFTERS[drafter](), max_batch_size=8, adaptive=False)
    decoder._loop._ring, decoder._loop._details = Everything(), Zeros()
    for i in range(6):
        decoder.submit([3, 5, 7, i], PARAMS[name][i % len(PARAMS[name])])
    decoder.step()
    shape = decoder._loop._make_room()
    with torch.inference_mode(), Widths() as widths:
        decoder._loop.rounds.run(shape)
    alone = name in ("greedy", "coupled") or (name == "rejection" and drafter != "model")
    assert (widths.found == []) is alone, widths.found


@pytest.mark.parametrize("kind", MODELS)
def test_launches_of_a_round(kind, monkeypatch):
    """K + 1 passes of models, one launch of each op that is needed, and below 90 others; 70 more for the controller."""
    passes = []

    def counted(scored, *args, **options):
        before = trace.launches
        out = scored(*args, **options)
        passes.append(trace.launches - before)
        return out

    for name in ("forward", "hidden"):
        scored = getattr(ModelAdapter, name)
        monkeypatch.setattr(
            ModelAdapter, name, lambda *args, _scored=scored, **options: counted(_scored, *args, **options)
        )
    for adaptive in (False, True):
        for name in DRAFTERS:
            with Trace(context=100) as trace:  # for the steps before as well
                decoder = SpeculativeDecoder(on_meta(kind), DRAFTERS[name](), max_batch_size=8, adaptive=adaptive)
                decoder._loop._ring = Everything()
                for i in range(8):
                    decoder.submit([3, 5, 7, i], SamplingParams(temperature=0))
                decoder.step()
                shape = decoder._loop._make_room()
            passes.clear()
            with Trace(context=100) as trace:
                decoder._loop.rounds.run(shape)
            assert len(passes) == (5 if name == "model" else 1)
            own = {op: cost.launches for op, cost in trace.by_op.items() if op.startswith("specdec.")}
            assert own.pop("specdec.verify_head") == 2
            assert own.pop("specdec.ngram_propose", None) == (1 if name == "lookup" else None)
            assert own.pop("specdec.sample_head", None) == (8 if name == "model" else None)
            assert set(own) == {
                "specdec.append_kv", "specdec.row_mean", "specdec.skinny_linear", "specdec.verify_attention"
            }  # fmt: skip
            products = sum(trace.by_op[op].launches for op in ("aten.mm", "aten.addmm", "aten.bmm", "aten.linear"))
            assert (products > 0) is (name == "model")  # the drafter's: the target's passes are exact
            rest = trace.launches - sum(passes) - (8 if name == "model" else 0)
            assert rest < 90 + 70 * (adaptive and name != "none") + 60 * (name == "model")
            assert trace.bytes > 0


# Capture and replay.


@lru_cache
def device_like():
    """The toy model over CPU tensors, treated like one on a device."""
    adapter = ModelAdapter(toy_model())
    adapter.fixed_shapes = True
    return adapter


def recorded(drafter, **options):
    options = {"num_draft_tokens": 3, "page_size": 5, "exact": False, "adaptive": False, **options}
    decoder = SpeculativeDecoder(device_like(), drafter, **options)
    decoder._loop._graphs = StepGraphs(RecordedGraph)
    return decoder


PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9], [60], list(range(20, 50)), [8, 8, 8]]
ON_CPU = {"none": NoDraft, "lookup": PromptLookup, "model": lambda: DraftModel(toy_model(seed=1, num_hidden_layers=1))}


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("drafter", ON_CPU)
def test_replayed_rounds_write_the_same_texts(drafter, adaptive):
    """faults.md G1, G2, G3: batches grow and shrink through the captured sizes, texts cross table widths."""
    new = 40
    decoder = recorded(ON_CPU[drafter](), adaptive=adaptive)
    handles = []
    for i, prompt in enumerate(PROMPTS):
        handles.append(decoder.submit(prompt, SamplingParams(temperature=0, max_new_tokens=new - 5 * i)))
        decoder.step()
        decoder.step()
    decoder.run()
    graphs = decoder._loop._graphs
    assert graphs.captured >= 4
    assert graphs.replays > graphs.captured
    for i, (handle, prompt) in enumerate(zip(handles, PROMPTS, strict=True)):
        assert handle.token_ids == plain_greedy(device_like().model, prompt, new - 5 * i)


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_replayed_rounds_draw_the_same_texts(method):
    """Seeds, positions and filters are read from the slots, not frozen in a graph."""
    params = [SamplingParams(seed=i, top_p=0.9, temperature=1 + i / 10, max_new_tokens=20) for i in range(5)]
    options = {"method": method, "max_batch_size": 2, "max_seq_len": 64}
    drafter = ON_CPU["model"]()
    eager = SpeculativeDecoder(
        device_like(), drafter, num_draft_tokens=3, page_size=5, exact=False, adaptive=False, **options
    )
    want = [out.token_ids for out in eager.generate(PROMPTS, params)]
    decoder = recorded(drafter, **options)
    assert [out.token_ids for out in decoder.generate(PROMPTS, params)] == want
    assert [out.token_ids for out in decoder.generate(PROMPTS[::-1], params[::-1])] == want[::-1]
    assert decoder._loop._graphs.replays > 10


def test_a_captured_round_reads_the_decoders_own_buffers():
    """The slots, the pages, the weights and what the controller keeps; nothing that a step makes for itself."""
    decoder = recorded(PromptLookup(), adaptive=True, max_seq_len=64)
    decoder.generate(PROMPTS[:3], SamplingParams(temperature=0, max_new_tokens=12))
    loop = decoder._loop
    known = [*device_like().model.parameters(), *device_like().model.buffers(), loop.cache.block_table]
    known += [loop._slots.texts, loop._slots.stop_ids, *loop._slots.columns.values(), loop.rounds._report]
    known += [loop.rounds._steps, loop.rounds._zeros, loop.rounds._proposals._steps]
    known += [pool for i in range(2) for pool in loop.cache.layer(i)]
    known += [x for x in vars(loop._controllers[0]).values() if isinstance(x, torch.Tensor)]
    known += [x for n in (1, 2, 4, 8) for x in loop.rounds.costs.curve(n)[:2]]
    addresses = {(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in known}
    graphs = list(loop._graphs._graphs.values())
    assert graphs
    for graph in graphs:
        assert set(graph.reads) <= addresses


def test_replaced_buffers_are_captured_again():
    """A pool that grows, texts that become longer: the graphs of the old buffers are never replayed."""
    decoder = recorded(PromptLookup())
    for prompt, new in ((PROMPTS[1], 10), (PROMPTS[3], 60), (PROMPTS[0], 90)):
        (out,) = decoder.generate([prompt], SamplingParams(temperature=0, max_new_tokens=new))
        assert out.token_ids == plain_greedy(device_like().model, prompt, new)
    assert decoder._loop._graphs.replays > 0


def test_results_are_read_while_the_next_round_runs():
    """When a round is enqueued, the one before it has not been waited for."""
    decoder = recorded(PromptLookup())
    order = []

    class Ticket:
        def __init__(self, ticket, number):
            self.ticket, self.number = ticket, number

        def wait(self):
            order.append(("read", self.number))
            return self.ticket.wait()

    push = decoder._loop._ring.push

    def pushed(report):
        order.append(("enqueued", sum(kind == "enqueued" for kind, _ in order)))
        return Ticket(push(report), order[-1][1])

    decoder._loop._ring.push = pushed
    (out,) = decoder.generate([PROMPTS[0]], SamplingParams(temperature=0, max_new_tokens=12))
    assert out.token_ids == plain_greedy(device_like().model, PROMPTS[0], 12)
    reads = [i for i, (kind, _) in enumerate(order) if kind == "read"]
    assert [order[i][1] for i in reads] == list(range(len(reads)))
    for i in reads[:-2]:
        assert ("enqueued", order[i][1] + 1) in order[:i]


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_warmup_captures_what_will_be_replayed(drafter):
    """Every batch size and K, on empty slots, which leaves no trace; afterwards nothing is captured any more."""
    decoder = recorded(ON_CPU[drafter](), max_batch_size=6, max_seq_len=64, num_pages=60)
    decoder.warmup()
    graphs = decoder._loop._graphs
    assert graphs.captured == 4  # 1, 2, 4 and 6 requests
    outputs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=20))
    for out, prompt in zip(outputs, PROMPTS, strict=True):
        assert out.token_ids == plain_greedy(device_like().model, prompt, 20)
    assert graphs.captured == 4
    assert graphs.replays == decoder.stats.rounds


def test_warmup_captures_every_k_that_the_controller_may_choose(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    decoder = recorded(PromptLookup(), max_batch_size=2, max_seq_len=64, num_pages=26, adaptive=True)
    decoder.warmup()
    graphs = decoder._loop._graphs
    decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=20))
    assert graphs.replays == decoder.stats.rounds > 0


def test_requests_of_their_own_k_share_graphs():
    decoder = recorded(PromptLookup(), max_batch_size=4, max_seq_len=64, num_pages=60)
    for k in (None, 1, 2, 3):
        decoder.generate(PROMPTS[:3], SamplingParams(temperature=0, max_new_tokens=12, num_draft_tokens=k))
    limits = {shape.limit for shape, _ in decoder._loop._graphs._graphs}
    assert limits == {3}
