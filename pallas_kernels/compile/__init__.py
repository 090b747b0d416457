"""What the TPU compiler says of the kernels, on a machine without one: memory, and the schedule of every loop.

python -m pallas_kernels.compile report [--json FILE] [--device v5p] [--kernel index_select]
"""
