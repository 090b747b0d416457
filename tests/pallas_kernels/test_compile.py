"""The kernels compiled by the TPU's own compiler, and its schedule held against the recorded one."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path

import pytest

from pallas_kernels.compile import schedule
from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.devices import DEVICES
from pallas_kernels.compile.report import libtpu, of_kernel, table

pytestmark = pytest.mark.kernels
RECORDED = json.loads((Path(schedule.__file__).parent / "table.json").read_text())


def compilations():
    """A kernel's first case on every device, its others on one each."""
    seen = set()
    for n, (name, case) in enumerate(CASES.items()):
        devices = list(DEVICES) if case.kernel not in seen else [list(DEVICES)[n % len(DEVICES)]]
        seen.add(case.kernel)
        yield from ((name, device) for device in devices)


@pytest.mark.parametrize(("case", "device"), list(compilations()))
def test_compiles_at_full_size_without_a_copy_and_no_slower_than_recorded(case, device):
    row = of_kernel(case, device)
    assert row["temp_bytes"] < (CASES[case].temporary or CASES[case].hbm_bytes / 2)
    assert row.get("matrix_share", 0) <= 1
    if libtpu() == RECORDED["libtpu"]:  # another compiler schedules otherwise
        key = itemgetter("name", "device", "shape")
        then = next(r for r in RECORDED["kernels"] if key(r) == key(row))
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


def test_the_readme_shows_the_recorded_table():
    readme = Path(schedule.__file__).parent.parent / "README.md"
    assert table(RECORDED) in readme.read_text()
