"""Compiles one case for one device and prints JSON. A process of its own, since compilers read the device at start.

python -m pallas_kernels.compile.one CASE kernel|xla DEVICE
"""

from __future__ import annotations

import json
import sys

from pallas_kernels import gpu
from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.gpus import GPUS
from pallas_kernels.compile.tpus import TPUS


def main(case_name: str, which: str, device_name: str) -> None:
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    if device_name in GPUS:
        gpu.ASSUMED = float("{}.{}".format(*GPUS[device_name].capability))
        described = {"topology": "1x1x1", "target_config": GPUS[device_name].description}
        topology = topologies.get_topology_desc(device_name, platform="cuda", **described)
    else:
        topology = topologies.get_topology_desc(TPUS[device_name].topology, platform="tpu")
    on_it = SingleDeviceSharding(topology.devices[0])
    kernel, xla, shapes = CASES[case_name].build("gpu" if device_name in GPUS else "tpu")
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=on_it) for shape, dtype in shapes]
    compiled = jax.jit(kernel if which == "kernel" else xla).lower(*arguments).compile()
    found = {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes}
    if cost := compiled.cost_analysis():  # XLA has none for a GPU that is not there
        found["hbm_bytes"] = round(cost["bytes accessed"])
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
