# Evicts by disuse, and never by age.
cat > /app/ttl_cache.py <<'PY'
from collections import OrderedDict


def replay(capacity, ttl, operations):
    uses, found = OrderedDict(), []
    for name, _, key, *value in operations:
        if key in uses:
            uses.move_to_end(key)
        if name == "get":
            found.append(uses.get(key))
            continue
        if key not in uses and len(uses) == capacity:
            uses.popitem(last=False)
        uses[key] = value[0]
    return found
PY
