"""The kernels compiled by the TPU's own compiler and the GPU's, held against what they said before."""

from __future__ import annotations

import json
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import jax
import pytest

from pallas_kernels.compile import device, gpu_report, ptx, schedule
from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.gpus import GPUS
from pallas_kernels.compile.report import table
from pallas_kernels.compile.tpu_report import libtpu, of_kernel
from pallas_kernels.compile.tpus import TPUS

pytestmark = pytest.mark.compile
RECORDED = json.loads((Path(schedule.__file__).parent / "table.json").read_text())


SAME = itemgetter("name", "device", "shape")


def compilations():
    """A kernel's first case on every TPU, its others on one each."""
    seen = set()
    for n, (name, case) in enumerate(CASES.items()):
        tpus = list(TPUS) if case.kernel not in seen else [list(TPUS)[n % len(TPUS)]]
        seen.add(case.kernel)
        yield from ((name, tpu) for tpu in tpus)


@pytest.mark.parametrize(("case", "tpu"), list(compilations()))
def test_compiles_at_full_size_without_a_copy_and_no_slower_than_recorded(case, tpu):
    row = of_kernel(case, tpu)
    assert row["temp_bytes"] < CASES[case].limit("tpu")
    assert row.get("matrix_share", 0) <= 1
    if libtpu() == RECORDED["libtpu"]:  # another compiler schedules otherwise
        then = next(r for r in RECORDED["kernels"] if SAME(r) == SAME(row))
        assert row["cycles"] <= then["cycles"]


OF_GPUS = [(name, gpu) for name, case in CASES.items() for gpu in GPUS if gpu_report.serves(gpu, case)]


@pytest.mark.parametrize(("case", "gpu"), OF_GPUS)
def test_compiles_for_a_gpu_in_little_memory_and_takes_no_more_of_it_than_recorded(case, gpu):
    row = gpu_report.of_kernel(case, gpu)
    assert row["temp_bytes"] < CASES[case].limit("gpu")
    assert row["shared_kib"] <= GPUS[gpu].shared_kib
    # The products are the matrix units', on Hopper mostly those that read shared memory.
    by_hopper, others = (row["wgmma"], row["mma"]) if gpu == "h100" else (0, row["wgmma"])
    assert others <= by_hopper
    assert (row["wgmma"] + row["mma"] > 0) == (CASES[case].multiply_adds > 0)
    if gpu_report.compilers() == RECORDED["cuda"]:
        then = next(r for r in RECORDED["kernels"] if SAME(r) == SAME(row))
        assert row["spills"] <= then["spills"]
        assert row["registers"] <= then["registers"]


def test_a_machine_without_a_gpu_says_so_and_claims_nothing():
    command = [sys.executable, "-m", "pallas_kernels.compile", "device"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "no GPU here" in done.stdout and "|" not in done.stdout


def test_the_table_of_a_device_holds_every_operation_and_finds_a_wrong_one():
    """XLA beside itself, at small sizes."""
    sizes = device.Sizes(4, 2, 256, 16, 32, heads=4, rope=16, index_heads=4, repeats=2)
    operations = list(device.operations(sizes))
    rows = [device.compare(*operation, sizes, backend="xla") for operation in operations]
    assert len(rows) == 10 and all(row.difference == 0 and row.kernel_ms > 0 for row in rows)
    shown = device.table(rows, sizes)
    assert all(f"| {row.name} | 0.0e+00 |" in shown for row in rows)
    name, operation, arguments = operations[2]
    wrong = lambda backend, *args: jax.tree.map(
        lambda a: a * (1.5 if backend == "other" else 1), operation("xla", *args)
    )
    assert device.compare(name, wrong, arguments, sizes, "other").difference == pytest.approx(0.5)
    name, operation, arguments = operations[0]
    later = lambda backend, *args: (operation("xla", *args)[0] + (256 if backend == "other" else 0),)
    assert device.compare(name, later, arguments, sizes, "other").difference == 1
    with pytest.raises(RuntimeError, match="index_select does not run on cpu: .*no backend 'other'"):
        device.compare(*operations[0], sizes, "other")


LAUNCHES = """
001: kCustomKernel [source       | next=002 (1)] sparse_mla grid: [64, 4, 1] threads: [256, 1, 1]  shared_memory: 164096 bytes
002: kCopy [prev=001 (1)]
003: kCustomKernel [prev=001 (1) | sink        ] loop_add_fusion grid: [32, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
"""  # noqa: E501


def test_launches_are_read_with_their_programs_and_shared_memory(tmp_path):
    (tmp_path / "module_0001.thunk_sequence.txt").write_text(LAUNCHES)
    assert ptx.launches(tmp_path) == [("sparse_mla", 256, 256, 164096), ("loop_add_fusion", 32, 128, 0)]


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
