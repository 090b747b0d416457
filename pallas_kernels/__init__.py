"""Pallas kernels, one folder per operation. Nothing in here knows of glm_jax."""
