"""Sets of points on a line, as lists of closed intervals."""


def merge(intervals):
    merged = []
    for start, end in intervals:
        if merged and start < merged[-1][1]:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return merged


def gaps(intervals, low, high):
    found = []
    position = low
    for start, end in merge(intervals):
        if start > position:
            found.append([position, start])
        position = end
    return found
