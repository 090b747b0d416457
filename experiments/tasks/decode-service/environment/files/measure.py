"""Runs decode.py beside a public stand-in for the model, and counts."""

import hashlib
import json
import random
import subprocess
import sys

rng = random.Random(0)
common = [rng.randrange(50) for _ in range(6)]
prompts = [common[: rng.randint(0, 6)] + [rng.randrange(50) for _ in range(rng.randint(1, 5))] for _ in range(8)]
states, fed, calls, count = {None: ()}, 0, 0, 5
child = subprocess.Popen([sys.executable, "/app/decode.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
for line in child.stdout:
    request, reply = json.loads(line), {}
    if request["ask"] == "prompts":
        reply = {"prompts": prompts, "tokens": count}
    elif request["ask"] == "step":
        calls, reply = calls + 1, {"parts": []}
        for state, tokens in request["parts"]:
            text = states[state] + tuple(tokens)
            fed, states[len(states)] = fed + len(tokens), text
            reply["parts"].append([len(states) - 1, hashlib.sha256(repr(text).encode()).digest()[0] % 50])
    child.stdin.write(json.dumps(reply) + "\n")
    child.stdin.flush()
distinct = {tuple(prompt) for prompt in prompts}
beginnings = {prompt[:i] for prompt in distinct for i in range(1, len(prompt) + 1)}
print(f"tokens fed: {fed}, at most {len(beginnings) + (count - 1) * len(distinct)}")
print(f"calls: {calls}, at most {max(map(len, prompts)) + count}")
