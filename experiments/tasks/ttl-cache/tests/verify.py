"""Plays hidden operations on a plain list, as the instruction says it, word for word."""

import sys

sys.path.insert(0, "/grader")
import grader  # noqa: E402


def reference(capacity, ttl, operations):
    entries, found = {}, []  # key -> [value, put at, used at]
    for step, (name, time, key, *value) in enumerate(operations):
        there = key in entries and time - entries[key][1] < ttl
        if name == "get":
            found.append(entries[key][0] if there else None)
            if there:
                entries[key][2] = step
            continue
        if not there:
            entries.pop(key, None)
            if len(entries) >= capacity:
                entries = {k: e for k, e in entries.items() if time - e[1] < ttl}
            if len(entries) >= capacity:
                del entries[min(entries, key=lambda k: entries[k][2])]
        entries[key] = [value[0], time, step]
    return found


def operations(rng, count, keys, rate):
    time, made = 0, []
    for i in range(count):
        time += rng.choice((0, 0, 1, rate))
        key = f"k{int(keys * rng.random() ** 2)}"
        made.append(["put", time, key, i] if rng.random() < 0.5 else ["get", time, key])
    return made


def verify():
    rng = grader.rng()
    cases = [[rng.randint(1, 6), rng.randint(1, 30), operations(rng, 120, 9, 4)] for _ in range(25)]
    cases.append([2000, 10**6, operations(rng, 12000, 6000, 1)])  # nothing ages: a full cache, long uses
    cases.append([2000, 700, operations(rng, 20000, 3000, 1)])
    for case, got in zip(cases, grader.call("/app/ttl_cache.py", "replay", cases, timeout=6.0), strict=True):
        want = reference(*case)
        if not grader.same(got, {"value": want}):
            raise grader.Failed(f"replay with capacity {case[0]} and ttl {case[1]} differs from the instruction")


grader.main(verify)
