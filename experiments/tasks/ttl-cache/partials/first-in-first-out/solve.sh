# Ages right, and evicts what was put first.
cat > /app/ttl_cache.py <<'PY'
def replay(capacity, ttl, operations):
    entries, found = {}, []
    for name, time, key, *value in operations:
        entries = {k: e for k, e in entries.items() if e[1] > time}
        if name == "get":
            found.append(entries[key][0] if key in entries else None)
            continue
        if key not in entries and len(entries) == capacity:
            del entries[next(iter(entries))]
        entries.pop(key, None)
        entries[key] = (value[0], time + ttl)
    return found
PY
