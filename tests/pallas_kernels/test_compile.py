"""The kernels compiled by the TPU's own compiler, and its schedule held against the recorded one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pallas_kernels.compile import schedule
from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.devices import DEVICES
from pallas_kernels.compile.report import compiled, libtpu, measure

pytestmark = pytest.mark.kernels
RECORDED = json.loads((Path(schedule.__file__).parent / "table.json").read_text())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_compiles_at_full_size_without_a_copy_of_the_keys(case, device):
    memory, kernels = compiled(case, "kernel", device)
    assert any(name.startswith(CASES[case].kernel) for name in kernels)
    assert memory["temp_bytes"] < CASES[case].hbm_bytes / 2


@pytest.mark.parametrize("device", ["v5p", "v6e"])
@pytest.mark.parametrize("case", ["select_prefill_128k"])
def test_no_slower_than_recorded_for_this_compiler(case, device):
    row = measure(case, device)
    assert row["matrix_share"] <= 1
    if libtpu() == RECORDED["libtpu"]:  # another compiler schedules otherwise
        then = next(r for r in RECORDED["kernels"] if (r["device"], r["shape"]) == (device, CASES[case].shape))
        assert row["cycles"] <= then["cycles"]


BUNDLES = """
 0x0   : { } /* before */
 0x1 LB: > { %s = scmp.ge.s32.totalorder %s1, 5 /* loop exit test
 0x2 LB: >> { %s = scmp.ge.s32.totalorder %s2, 3 /* loop exit test
 0x3   : >> { }
 0x4   : > { }
 0x5 LB: >> { }
 0x6   : { }
"""


def test_cycles_are_bundles_times_the_trips_of_all_loops_around_them():
    loops = schedule.loops(BUNDLES)
    assert [(loop.depth, loop.trips, loop.bundles) for loop in loops] == [(1, 5, 2), (2, 3, 2), (2, None, 1)]
    assert schedule.runs(loops, unknown=7) == [5, 15, 35]
    assert schedule.cycles(loops, schedule.runs(loops, unknown=7)) == 2 * 5 + 2 * 15 + 35
