"""Every test sees eight fake CPU devices, full-precision products and a compilation cache that outlives the run."""

import os
from pathlib import Path

import pytest

# These have to stand before jax is imported, in the test processes and in the processes that tests start.
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")


@pytest.fixture(scope="module")
def hasty_compiles():
    """LLVM spends less on the same XLA program: for modules that compare with a reference within a tolerance.

    Whether two programs give the same bits is asked of the code that users run: not for modules that do.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
