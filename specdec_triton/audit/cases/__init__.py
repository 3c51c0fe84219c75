"""What the audit compiles: ops in the shapes of real models, each at many run-time sizes that one binary has to serve."""

from __future__ import annotations

from specdec_triton.audit.cases import paged, products, rows, rowwise, trees
from specdec_triton.audit.cases.base import Case


def cases() -> list[Case]:
    return [*paged.cases(), *rows.cases(), *trees.cases(), *products.cases(), *rowwise.cases()]
