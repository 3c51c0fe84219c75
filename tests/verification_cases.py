"""What the tests of ``specdec_triton.verification`` share: toy targets, and each check on them."""

from __future__ import annotations

from functools import lru_cache

import torch

from specdec_triton import PromptLookup, ops
from specdec_triton.adapter import ModelAdapter
from specdec_triton.testing import toy_model
from specdec_triton.verification import check_distribution, check_greedy, check_module, check_seeds

# After the last one the toy targets repeat themselves: n-grams are accepted.
PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9, 2, 9, 2], [*range(20, 40)], [5, 11, 47, 0] * 2]
NEW = 12
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@lru_cache
@torch.inference_mode()
def target(kind="llama", dtype=torch.float32, **config):
    return ModelAdapter(toy_model(kind, dtype=dtype, **config))


@lru_cache
@torch.inference_mode()
def mixture():
    return target("mixtral", **EXPERTS)


@lru_cache
def similar(apart=0.01):
    """A draft model whose distributions resemble the target's."""
    model, generator = toy_model(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += apart * torch.randn(parameter.shape, generator=generator)
    return model


def greedy(of=None, drafter=None, **options):
    return check_greedy(of or target(), drafter or PromptLookup(), PROMPTS, max_new_tokens=NEW, **options)


def seeds(of=None, drafter=None, **options):
    return check_seeds(of or target(), drafter or PromptLookup(), PROMPTS, max_new_tokens=NEW, **options)


def module(of=None):
    return check_module(of or target(), PROMPTS, max_new_tokens=NEW)


def distribution(of=None, drafter=None, samples=200, **options):
    return check_distribution(of or target(), drafter or PromptLookup(), PROMPTS[0], samples=samples, **options)


def wrong_accepts(monkeypatch, method=None):
    """An accept rule that keeps one draft more than it may."""
    accept = ops.accept_reject

    def lenient(draft_tokens, *args, draft_lens, **options):
        tokens, accepted, status = accept(draft_tokens, *args, draft_lens=draft_lens, **options)
        more = (accepted < draft_lens) & (method in (None, options["method"]))
        for b in more.nonzero()[:, 0].tolist():
            at = int(accepted[b])
            tokens[b, at : at + 2] = torch.stack([draft_tokens[b, at], tokens[b, at]])
        return ops.AcceptResult(tokens, accepted + more, status)

    monkeypatch.setattr(ops, "accept_reject", lenient)
