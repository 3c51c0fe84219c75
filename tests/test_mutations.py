"""The statistics suite finds what it is for: faults that other decoders had, seeded into the production code one by one.

A bug is an edit of a function's source. The text that it replaces must occur there exactly once: an edit that has lost its
place is an error. So is a bug with which the check named beside it still passes.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import CodeType
from typing import NamedTuple

import pytest
import statistics_cases as cases
import torch
from statistics_checks import (
    LEVEL,
    Check,
    assert_failures_stay_alone,
    assert_never_accepted,
    assert_one_path,
    assert_open_interval,
    assert_same_in_any_order,
    follows,
)
from statistics_engine import Request, Setting, TableDrafter

from specdec_triton import NoDraft
from specdec_triton.drafters.base import drafts_of
from specdec_triton.engine.drawing import Drawing
from specdec_triton.engine.judge import Judge
from specdec_triton.engine.proposals import Proposals
from specdec_triton.engine.round import Rounds
from specdec_triton.engine.slots import Slots
from specdec_triton.head import Head
from specdec_triton.reference import accept_reject as judging
from specdec_triton.reference import logits, noise
from specdec_triton.testing import NAN

DRAWS = 30_000


def of(setting: Setting, *, acceptance: bool = True) -> Check:
    return lambda: follows(setting, DRAWS, acceptance=acceptance)


def surely(check: Callable[..., None], *args: object) -> Check:
    """A check in which chance plays no part."""

    def run() -> float:
        check(*args)
        return 1.0

    return run


COUPLED = cases.chain("coupled", 2)
FAILING = cases.adversary("equal")
BAD = torch.tensor([2])
SPOILED = replace(FAILING, target=cases.changed(FAILING.target, lambda rows: rows.index_fill(0, BAD, NAN)))
CHECKS: dict[str, Check] = {
    "rejection": of(cases.chain("rejection", 2)),
    "block": of(cases.chain("block", 2)),
    "coupled": of(COUPLED),
    "unwritten": of(cases.chain("coupled", 2, device=True)),
    "unwritten-certain": of(cases.adversary("certain", device=True)),
    "mixed": of(cases.mixed(device=False)),
    "filters": of(cases.grid("rejection", cases.GRID[2:6])),
    "temperature": of(cases.grid("rejection", cases.GRID[:24:8])),
    "stops": of(cases.stopping("coupled"), acceptance=False),
    "certain": of(cases.adversary("certain")),
    "foreign": of(cases.adversary("foreign-ids")),
    "disjoint": of(cases.adversary("disjoint")),
    "ties": of(cases.tied()),
    "impossible": surely(assert_never_accepted, cases.lying(), 5_000),
    "interval": surely(assert_open_interval),
    "order": surely(assert_same_in_any_order, cases.mixed(TableDrafter(cases.DRAFT), device=False), 600),
    "failing": surely(assert_failures_stay_alone, FAILING, SPOILED, BAD, 2_000),
    "path": surely(assert_one_path, Setting(cases.TARGET, NoDraft(), [Request("coupled")], k=0), [COUPLED], 2_000),
}


class Edit(NamedTuple):
    """Of a function's source: ``old`` occurs in it once."""

    function: Callable
    old: str
    new: str


def bug(check: str, *edits: Edit) -> tuple[str, tuple[Edit, ...]]:
    """Edits, and the check that notices them."""
    return check, edits


JUDGE = judging.accept_reject
UNIFORMS = "step[:k], Stream.ACCEPT)"
DRAFT_ROWS = "scaled = _scaled_rows(draft_logits, *params)"
LOG_Q = "scaled.log_softmax(-1) if draft_lse is None else scaled - draft_lse[..., None]"
OF_ITSELF = Edit(JUDGE, LOG_Q, "scaled.log_softmax(-1)")
LAST_ROW = "last = raced[row, num_accepted]"
LAST_P = "_residual(log_p[row, num_accepted]"

NOISE = {
    "draft-and-residual-share-noise": bug("rejection", Edit(JUDGE, "int(Stream.RECOVERED)", "int(Stream.DRAFT)")),
    "draft-and-bonus-share-noise": bug(
        "rejection",
        Edit(JUDGE, "int(Stream.BONUS)", "int(Stream.DRAFT)"),
        Edit(JUDGE, "position, num_accepted, stream)", "position, num_accepted - (~rejected).int(), stream)"),
    ),
    "drafts-share-noise": bug("rejection", Edit(Drawing.chain, "else (params, j)", "else (params, 0)")),
    "u-of-accept-draws-the-residual": bug("rejection", Edit(JUDGE, "int(Stream.RECOVERED)", "int(Stream.ACCEPT)")),
    "one-u-for-all-drafts": bug("rejection", Edit(JUDGE, UNIFORMS, "step[:1], Stream.ACCEPT)")),
    "u-is-0": bug("rejection", Edit(JUDGE, UNIFORMS, f"{UNIFORMS} * 0")),
    "u-is-0-and-accepts-the-impossible": bug(
        "disjoint",
        Edit(JUDGE, UNIFORMS, f"{UNIFORMS} * 0"),
        Edit(judging._rejection, "< log_p_draft", "<= log_p_draft"),
    ),
    "u-may-be-0": bug("interval", Edit(noise.to_uniform, " + 2.0**-33", "")),
    "u-may-be-1": bug("interval", Edit(noise.to_uniform, ".clamp(max=_LARGEST_BELOW_ONE)", "")),
    "noise-by-batch-row": bug(
        "order", Edit(noise.race, "(seed) + stream", "(seed) + stream + 8 * torch.arange(len(seed))")
    ),
    "noise-without-position": bug("rejection", Edit(Slots.params, "[rows].long()", "[rows].long() * 0")),
    "coupled-noise-of-the-round": bug("coupled", Edit(JUDGE, "position + t, node", "position, node")),
    "coupled-noise-by-draft": bug("path", Edit(JUDGE, "position + t, node", "position, node + t")),
    "coupled-drafts-with-other-noise": bug("coupled", Edit(Drawing.chain, "(params.after(j), None)", "(params, None)")),
}
UNWRITTEN = {  # rounds on a device, whose logits are not written
    "coupled-drafts-with-other-noise-unwritten": bug(
        "unwritten", Edit(Drawing.unwritten, "(params.after(j), None)", "(params, None)")
    ),
    "drafts-judged-one-row-late": bug("unwritten", Edit(Head.verify, "(hidden,", "(hidden.roll(-1, 1),")),
    "drafted-token-races-for-its-own-place": bug(
        "unwritten-certain", Edit(JUDGE, "rejected & (residual > NEG_INF).any(-1)", "rejected & False")
    ),
}
DISTRIBUTIONS = {
    "raw-q-with-filters": bug(
        "filters", Edit(JUDGE, DRAFT_ROWS, DRAFT_ROWS.replace("*params", "*params[:-1], False")), OF_ITSELF
    ),
    "q-of-another-draft": bug("rejection", Edit(drafts_of, "draft in drawn if", "draft in drawn[::-1] if")),
    "temperature-not-in-q": bug("temperature", Edit(JUDGE, DRAFT_ROWS, "scaled = draft_logits.float()"), OF_ITSELF),
    "temperature-not-in-p": bug(
        "temperature", Edit(JUDGE, "raced = _scaled_rows(target_logits, *params)", "raced = target_logits.float()")
    ),
    "residual-is-p": bug("rejection", Edit(JUDGE, "rejected & (residual > NEG_INF).any(-1)", "rejected & False")),
    "residual-wrongly-normalised": bug(
        "rejection",
        Edit(judging._recovering, "log_q[row, at]).log()", "log_q[row, at])"),
    ),
    "residual-not-clamped": bug("rejection", Edit(judging._residual, ".clamp(min=0)", "")),
    "residual-of-absolute-differences": bug("rejection", Edit(judging._residual, ".clamp(min=0)", ".abs()")),
    "bonus-from-q": bug(
        "rejection",
        Edit(
            JUDGE,
            LAST_ROW,
            "last = torch.where((num_accepted == k)[:, None], log_q[:, -1], raced[row, num_accepted])",
        ),
    ),
    "certain-draft-comes-back": bug(
        "certain", Edit(judging._recovering, "last.scatter(-1, drafts[row, at][:, None], NEG_INF)", "last")
    ),
    "block-weight-not-in-the-residual": bug(
        "block", Edit(judging._block, "accepted, weight.gather", "accepted, torch.ones_like(weight).gather")
    ),
    "block-weight-not-in-the-mass": bug(
        "block", Edit(judging._block, "(log_p[:, i], w,", "(log_p[:, i], torch.ones_like(w),")
    ),
}
DECISIONS = {
    "compared-with-the-argmax": bug(
        "rejection",
        Edit(
            judging._rejection,
            "(u.log() + log_q_draft < log_p_draft)",
            "(drafts == log_p[:, : drafts.shape[1]].argmax(-1))",
        ),
    ),
    "q-0-accepted": bug("impossible", Edit(judging._rejection, " & (log_q_draft > NEG_INF)", "")),
    "accepted-behind-a-rejection": bug("rejection", Edit(judging.prefix, ".cumprod(-1)", "")),
    "greedy-rows-judged-by-chance": bug(
        "mixed", Edit(JUDGE, "torch.where(greedy, accepted, num_accepted)", "num_accepted")
    ),
    "last-tie-wins": bug(
        "ties",
        Edit(logits.best_of, "known.numpy().argmax(-1)", "known.shape[-1] - 1 - known.flip(-1).numpy().argmax(-1)"),
    ),
    "bad-row-goes-on": bug("failing", Edit(logits.bad_rows, "return ~(", "return False & (")),
    "bad-row-fails-the-batch": bug(
        "failing", Edit(JUDGE, "lens[:, None])).any(-1)", "lens[:, None])).any().expand(batch)")
    ),
}
PLACES = {
    "next-target-row": bug("mixed", Edit(Judge.packed_rows, "[request] + step", "[request] + step + 1")),
    "target-row-before": bug(
        "rejection",
        *(
            Edit(function, x, x.replace("num_accepted", "(num_accepted - 1).clamp(min=0)"))
            for function, x in ((JUDGE, LAST_ROW), (judging._recovering, LAST_P))
        ),
    ),
    "next-draft-row": bug("rejection", Edit(judging._recovering, ", num_accepted.clamp", ", (num_accepted + 1).clamp")),
    "context-one-short": bug("rejection", Edit(Rounds._verify, "(lens - 1).clamp", "(lens - 2).clamp")),
    "foreign-ids-become-drafts": bug(
        "foreign",
        Edit(
            Proposals._cut,
            "torch.minimum(lens, first_foreign)",
            "lens; drafts.tokens.clamp_(0, self._slots.vocab_size - 1)",
        ),
    ),
    "tokens-behind-a-stop": bug(
        "stops",
        Edit(
            Rounds._commit,
            "torch.minimum(torch.minimum(accepted + 1, room), first_stop + 1)",
            "torch.minimum(accepted + 1, room)",
        ),
    ),
}
BUGS = {**NOISE, **UNWRITTEN, **DISTRIBUTIONS, **DECISIONS, **PLACES}


def edited(function: Callable, edits: Sequence[Edit]) -> CodeType:
    """The code of a function with its source changed.

    Raises:
        LookupError: a text that is to be replaced is not there, or more than once.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        if source.count(edit.old) != 1:
            raise LookupError(f"{function.__qualname__} has {source.count(edit.old)} times: {edit.old}")
        source = source.replace(edit.old, edit.new)
    flags = annotations.compiler_flag  # of this file's first import
    module = compile(source, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    return next(x for x in module.co_consts if isinstance(x, CodeType) and x.co_name == function.__name__)


def seed_bug(monkeypatch: pytest.MonkeyPatch, edits: Sequence[Edit]) -> None:
    """Change the functions themselves, under whatever names they are known elsewhere."""
    for function in dict.fromkeys(inspect.unwrap(edit.function) for edit in edits):
        mine = [edit for edit in edits if inspect.unwrap(edit.function) is function]
        monkeypatch.setattr(function, "__code__", edited(function, mine))


@pytest.mark.parametrize("name", CHECKS)
def test_the_code_as_it_is_passes(name):
    assert CHECKS[name]() > LEVEL


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name, monkeypatch):
    check, edits = BUGS[name]
    seed_bug(monkeypatch, edits)
    try:
        p_value = CHECKS[check]()
    except AssertionError:
        return
    assert p_value < LEVEL, f"{check} does not notice"


def test_an_edit_that_lost_its_place_is_an_error(monkeypatch):
    for old in ("no such text", "u"):
        with pytest.raises(LookupError, match="times"):
            seed_bug(monkeypatch, [Edit(judging._rejection, old, "")])
