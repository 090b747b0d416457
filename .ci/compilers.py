"""Prints what pip has to install to compile for a TPU and a GPU by the jax that is installed here."""

from importlib.metadata import requires, version

libtpu = next(need.split(";")[0] for need in requires("jax") if need.startswith("libtpu"))
cuda = [f"jax-cuda13-{part}=={version('jaxlib')}" for part in ("plugin", "pjrt")]
print(libtpu.replace(" ", ""), *cuda, "nvidia-cuda-nvcc==13.*")
