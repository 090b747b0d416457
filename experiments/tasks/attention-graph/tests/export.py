"""In the candidate's box: the graph of attend, as bytes that only a compiler reads."""

import importlib.util
import os
import sys

answer = os.dup(1)
os.dup2(2, 1)
spec = importlib.util.spec_from_file_location("attend", "/app/attend.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
attend = module.attend
import jax  # noqa: E402  (after the candidate's file, which may not even load)

shape = tuple(int(size) for size in sys.argv[1:])
arguments = [jax.ShapeDtypeStruct(shape, "float32")] * 3
os.write(answer, jax.export.export(jax.jit(attend))(*arguments).mlir_module_serialized)
