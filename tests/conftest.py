"""Every test sees eight fake CPU devices, full-precision products and a compilation cache that outlives the run."""

import os
from pathlib import Path

import pytest

# These have to stand before jax is imported, in the test processes and in the processes that tests start.
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of XLA's pool. With one for each device, devices that begin two independent collectives in different orders
# hold all of them, each waiting for the others.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")


APART = ("tests/test_readme.py", "tests/pallas_kernels/", "tests/envs/")  # their tests share nothing
TOGETHER = ("tests/program/",)  # its files share what they compute


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Sends a file's tests to one worker, where they share fixtures and what is cached."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(APART):
                return nodeid
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])

    return ByFile(config, log)


@pytest.fixture(scope="module")
def hasty_compiles():
    """LLVM spends less on the same XLA program: for modules that compare with a reference within a tolerance.

    Whether two programs give the same bits is asked of the code that users run: not for modules that do.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
