"""Compiles one case for one device and prints JSON. A process of its own, since libtpu reads the device at start.

python -m pallas_kernels.compile.one CASE kernel|xla DEVICE
"""

from __future__ import annotations

import json
import sys

from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.devices import DEVICES


def main(case_name: str, which: str, device_name: str) -> None:
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    topology = topologies.get_topology_desc(DEVICES[device_name].topology, platform="tpu")
    on_it = SingleDeviceSharding(topology.devices[0])
    kernel, xla, shapes = CASES[case_name].build()
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=on_it) for shape, dtype in shapes]
    compiled = jax.jit(kernel if which == "kernel" else xla).lower(*arguments).compile()
    memory, moved = compiled.memory_analysis(), compiled.cost_analysis()["bytes accessed"]
    print(json.dumps({"temp_bytes": memory.temp_size_in_bytes, "hbm_bytes": round(moved)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
