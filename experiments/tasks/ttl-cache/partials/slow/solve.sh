# Right, and far too slow: it looks at every entry in every operation.
cat > /app/ttl_cache.py <<'PY'
def replay(capacity, ttl, operations):
    entries, found = [], []
    for name, time, key, *value in operations:
        entries = sorted((e for e in entries if e["end"] > time), key=lambda e: e["used"])
        here = [e for e in entries if e["key"] == key]
        for entry in entries:
            entry["used"] += 0 if entry in here else 0
        if name == "get":
            found.append(here[0]["value"] if here else None)
            if here:
                here[0]["used"] = max(e["used"] for e in entries) + 1
            continue
        if here:
            entries.remove(here[0])
        elif len(entries) == capacity:
            entries.pop(0)
        used = max((e["used"] for e in entries), default=0) + 1
        entries.append({"key": key, "value": value[0], "end": time + ttl, "used": used})
    return found
PY
