"""Does speculation change what a target writes? Checks on a target, a drafter and prompts of your own.

Each check returns a :class:`Check`; ``specdec-triton verify`` runs them all. ``target`` is that of a decoder; prompts are token ids:

>>> target = SpeculativeDecoder(model).target                                                       # doctest: +SKIP
>>> print(check_greedy(target, PromptLookup(), [tokenizer("1 2 3 1 2 3")["input_ids"]]).detail)     # doctest: +SKIP

A check whose arguments do not fit raises ValueError. What counts as equal:

* ``check_greedy``, ``check_seeds``: token ids, against plain decoding (K = 0) by the same package.
* ``check_module``: plain decoding's greedy token ids, against the logits of the module's own forward pass, up to rounding.
* ``check_bits``: every bit of the target's logits, whatever else is in the pass.
* ``check_distribution``: how often each text is written, against probabilities enumerated with plain passes.

Where a model's rows depend on their neighbours there are no equal bits. There a text that parts from plain decoding is
judged token by token: each must be the best of plain scoring up to a stated gap (``texts.py``).
"""

from specdec_triton.verification.bits import check_bits
from specdec_triton.verification.check import Check, verdict
from specdec_triton.verification.costs import measure_acceptance, measure_speed
from specdec_triton.verification.distribution import check_distribution
from specdec_triton.verification.module import check_module
from specdec_triton.verification.texts import check_greedy, check_seeds

__all__ = [
    "Check",
    "check_bits",
    "check_distribution",
    "check_greedy",
    "check_module",
    "check_seeds",
    "measure_acceptance",
    "measure_speed",
    "verdict",
]
