"""All texts that a request with a few allowed tokens can write behind a context, by plain passes of one token each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter, SessionOptions
from specdec_triton.drafters.base import Drawn, Round, spread
from specdec_triton.sampling import SamplingBatch, SamplingParams
from specdec_triton.taps import Taps
from specdec_triton.verification.fit import Text
from specdec_triton.verification.scoring import Scorer

Probabilities = dict[int, float]  # of the tokens that may come next


@dataclass(frozen=True)
class Tree:
    """What may be written.

    Attributes:
        after: for each beginning of a text, shorter ones first on the way to longer ones, what may come next.
        texts: the probability of each whole text.
    """

    after: dict[Text, Probabilities]
    texts: dict[Text, float]


def next_tokens(logits: torch.Tensor, params: SamplingParams) -> Probabilities:
    """By logits ``[V]``, under the parameters' allowed ids, temperature and top-k; ties are all kept."""
    assert params.allowed_token_ids is not None
    ids = torch.tensor(params.allowed_token_ids, device=logits.device)
    scaled = logits[ids].double() / float(params.temperature or 1.0)
    least = scaled.topk(min(params.top_k or len(ids), len(ids))).values[-1]
    kept = (scaled >= least) & (scaled > float("-inf"))
    return dict(zip(ids[kept].tolist(), scaled[kept].softmax(0).tolist(), strict=True))


def enumerate_texts(scorer: Scorer, context: Sequence[int], params: SamplingParams) -> Tree:
    """Texts of ``params.max_new_tokens`` tokens behind the context."""
    tree = Tree({}, {})

    def walk(text: Text, probability: float, logits: torch.Tensor) -> None:
        tree.after[text] = next_tokens(logits, params)
        for token, p in tree.after[text].items():
            longer = (*text, token)
            if len(longer) == params.max_new_tokens:
                tree.texts[longer] = probability * p
            else:
                walk(longer, probability * p, scorer.after(token, len(context) + len(text)))

    walk((), 1.0, scorer.prefill(0, context))
    return tree


def favoured_tokens(
    drafter: Drafter, target: ModelAdapter, context: Sequence[int], tree: Tree, params: SamplingParams
) -> dict[Text, frozenset[int]]:
    """Behind each beginning of a text, the tokens that the drafter is likelier to draft than the target to write.

    These are the ones that are rejected at times; a draft that is certain is one of them.
    """
    ask = _asking(drafter, target, context, params)
    found = {}
    for text, p in tree.after.items():
        q = ask(text)
        found[text] = frozenset(token for token in p if q.get(token, 0.0) > p[token])
    return found


def _asking(
    drafter: Drafter, target: ModelAdapter, context: Sequence[int], params: SamplingParams
) -> Callable[[Text], Probabilities]:
    """What the drafter's next draft is behind a text, of whose tokens all but the last stood in a text asked for before.

    So a session takes each for the text before it, less some rejected drafts, and one token more.
    """
    longest = len(context) + params.max_new_tokens
    cache = target.new_cache(slots=1, page_size=16, num_pages=0, growable=True, max_tokens=longest + 1)
    cache.reserve(0, longest + 1)
    options = SessionOptions(slots=1, max_tokens=longest, cache=cache)
    one = torch.ones(1, dtype=torch.int32, device=target.device)

    def as_tensor(text: Text) -> torch.Tensor:
        return torch.tensor([[*context, *text]], device=target.device)

    def follow(texts: torch.Tensor) -> None:
        """What a session may look at besides the text: the target's keys and hidden states at all tokens but the last."""
        if session.free or texts.shape[1] < 2:
            return
        start = 0 * one
        target.forward(texts[:, :-1], cache, cache.block_table, start, last_only=True, taps=taps)
        if taps is not None:
            session.see(0, taps.states, start, None)

    with torch.inference_mode():
        session = drafter.bind(target, options)
        taps = Taps(target.model, session.taps) if session.taps else None
        session.reserve(0, longest)
        follow(as_tensor(()))
        if session.seen is not None:
            session.extend(0, as_tensor(())[0], 0, len(context) - 1)

    def draw(logits: torch.Tensor, j: int, ids: torch.Tensor | None = None) -> Drawn:
        logits = spread(logits, ids, target.vocab_size)
        return Drawn(logits.argmax(-1), logits.float().logsumexp(-1), logits)

    @torch.inference_mode()
    def ask(text: Text) -> Probabilities:
        texts = as_tensor(text)
        follow(texts)
        length = texts.shape[1]
        round_ = Round(
            k=1,
            texts=texts,
            lens=one * length,
            limits=one,
            params=SamplingBatch.from_params([params], [length], target.device, seeds=[0]),
            draw=draw,
            needs_logits=True,
            reads=not target.fixed_shapes,
        )
        drafts = session.propose(round_)
        if drafts.tokens.shape[1] == 0 or int(drafts.lens[0]) == 0:
            return {}
        if drafts.logits is None:
            return {int(drafts.tokens[0, 0]): 1.0}
        return next_tokens(drafts.logits[0, 0], params)

    return ask
