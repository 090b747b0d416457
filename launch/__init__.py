"""Submits training jobs to TPU pods and GPU clusters: `python -m launch`. Compiles nothing, needs no jax."""
