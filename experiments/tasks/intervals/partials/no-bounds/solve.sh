# Both functions handle the examples of the instruction, and an interval beyond `high` makes a gap beyond it.
cat > /app/intervals.py <<'PY'
def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def gaps(intervals, low, high):
    found = []
    position = low
    for start, end in merge(intervals):
        if start > position:
            found.append([position, start])
        position = max(position, end)
    if position < high:
        found.append([position, high])
    return found
PY
