"""The cases of every kernel."""

from __future__ import annotations

from pallas_kernels.compile.case import Case
from pallas_kernels.index_select.cases import CASES as INDEX_SELECT

CASES: dict[str, Case] = {**INDEX_SELECT}
