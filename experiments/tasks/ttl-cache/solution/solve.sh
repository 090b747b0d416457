cat > /app/ttl_cache.py <<'PY'
"""A cache whose entries end by age and, where it is full, by disuse."""

from collections import OrderedDict


def replay(capacity, ttl, operations):
    uses = OrderedDict()  # key -> (value, end), least recently used first
    births = OrderedDict()  # key -> end, oldest first: puts come in order of time
    found = []

    def forget(key):
        del uses[key], births[key]

    for name, time, key, *value in operations:
        if key in uses and uses[key][1] <= time:
            forget(key)
        if name == "get":
            if key in uses:
                uses.move_to_end(key)
            found.append(uses[key][0] if key in uses else None)
            continue
        if key in uses:
            forget(key)
        elif len(uses) == capacity:
            while births and next(iter(births.values())) <= time:
                forget(next(iter(births)))
            if len(uses) == capacity:
                forget(next(iter(uses)))
        uses[key] = (value[0], time + ttl)
        births[key] = time + ttl
    return found
PY
