"""Every test sees eight fake CPU devices, full-precision products, hasty compiles and a cache that outlives the run."""

import os
from importlib.metadata import version
from pathlib import Path

# These have to stand before jax is imported, in the test processes and in the processes that tests start.
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"
FLAGS = ["--xla_force_host_platform_device_count=8"]
# Compiling is most of what the tests do: LLVM spends less on the same program, and XLA takes its older emitters, which
# jax 0.12 has no more. With TESTS_COMPILE=full, as `make nightly` has it, the tests run the code that users run.
if os.environ.get("TESTS_COMPILE", "hasty") == "hasty":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if version("jaxlib").startswith("0.10."):
        FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of XLA's pool. With one for each device, devices that begin two independent collectives in different orders
# hold all of them, each waiting for the others.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
