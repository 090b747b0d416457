"""The attack on hidden inputs that are not drawn anew: what the oracle answered once is answered again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from glm_jax.envs.gates.answers import in_shell
from glm_jax.envs.sandbox.files import File

# A program that looks its answer up by its arguments, its input and the files of /data; else it gives the first.
_PROGRAM = """
import glob, json, sys
stdin = sys.stdin.buffer.read().decode("latin-1")
files = {name[6:]: open(name, "rb").read().decode("latin-1") for name in glob.glob("/data/**", recursive=True)
         if __import__("os").path.isfile(name)}
for one in RECORD:
    if "argv" in one and one["argv"][-len(sys.argv[1:]) or len(one["argv"]):] == sys.argv[1:] and (
            one["stdin"], one["files"]) == (stdin, files):
        break
else:
    one = next(one for one in RECORD if "argv" in one)
sys.stdout.buffer.write(one["out"].encode("latin-1"))
sys.stdout.flush()
"""
_MODULE = """
import json
def __getattr__(name):
    table = {json.dumps(case): found for one in RECORD if one.get("function") == name
             for case, found in zip(one["cases"], one["found"])}
    if not table:
        raise AttributeError(name)
    def look_up(*arguments):
        found = table.get(json.dumps(arguments), next(iter(table.values())))
        if "raised" in found:
            raise getattr(__builtins__, found["raised"], ValueError)
        return found["value"]
    return look_up
"""


def replay(
    start: Mapping[str, File], oracle: Mapping[str, File], record: Sequence[Mapping[str, object]]
) -> dict[str, File] | None:
    """Artifacts that answer as recorded; None where nothing was, or no program was asked. A service's asking is not."""
    record = [one for one in record if "last" not in one]
    if not record:
        return None
    forged = dict(oracle)
    for path, file in oracle.items():
        if start.get(path) == file:
            continue
        asks_functions = any("function" in one for one in record)
        code = f"RECORD = {json.loads(json.dumps(record))!r}\n{_MODULE if asks_functions else _PROGRAM}"
        if path.endswith(".py"):
            forged[path] = File(code.encode(), file.mode)
        elif path.endswith(".sh"):
            forged[path] = File(in_shell(code).encode(), file.mode)
    return forged if forged != dict(oracle) else None
