cat > /app/intervals.py <<'PY'
"""Sets of points on a line, as lists of closed intervals."""


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
        if position < min(start, high):
            found.append([position, min(start, high)])
        position = max(position, end)
    if position < high:
        found.append([position, high])
    return found
PY
