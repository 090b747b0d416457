"""The cases of every kernel."""

from __future__ import annotations

from pallas_kernels.compile.case import Case
from pallas_kernels.index_loss.cases import CASES as INDEX_LOSS
from pallas_kernels.index_select.cases import CASES as INDEX_SELECT
from pallas_kernels.quantize.cases import CASES as QUANTIZE
from pallas_kernels.sparse_mla.cases import CASES as SPARSE_MLA

CASES: dict[str, Case] = {**INDEX_LOSS, **INDEX_SELECT, **QUANTIZE, **SPARSE_MLA}
