"""Counts half-integer points one by one: slow, and nothing like the solution."""

import sys

sys.path.insert(0, "/grader")
import grader  # noqa: E402


def covered(intervals, half):
    return any(2 * start <= half <= 2 * end for start, end in intervals)


def merged(intervals):
    """Runs of covered half-integers; between two integers only a covering interval covers."""
    found, begin = [], None
    for half in range(-90, 92):
        if covered(intervals, half) and begin is None:
            begin = half
        elif not covered(intervals, half) and begin is not None:
            found.append([begin // 2, (half - 1) // 2])
            begin = None
    return found


def gaps(intervals, low, high):
    free = [not covered(intervals, 2 * at + 1) for at in range(low, high)]
    found = []
    for at, is_free in zip(range(low, high), free, strict=True):
        if is_free and found and found[-1][1] == at and not covered(intervals, 2 * at):
            found[-1][1] = at + 1
        elif is_free:
            found.append([at, at + 1])
    return found


def verify():
    rng = grader.rng()
    sets = [[], [[5, 8], [1, 3], [3, 4]], [[0, 10], [2, 3]], [[4, 4]], [[1, 2], [3, 4]]]
    for _ in range(60):
        starts = [rng.randint(-20, 20) for _ in range(rng.randint(0, 7))]
        sets.append([[start, start + rng.choice((0, 1, 2, 5, 12))] for start in starts])
    found = grader.call("/app/intervals.py", "merge", [[one] for one in sets])
    for one, got in zip(sets, found, strict=True):
        if not grader.same(got, {"value": merged(one)}):
            raise grader.Failed(f"merge({one}) gave {got}, not {merged(one)}")
    cases = [[one, low, low + rng.randint(0, 25)] for one in sets for low in (rng.randint(-25, 10),)]
    for case, got in zip(cases, grader.call("/app/intervals.py", "gaps", cases), strict=True):
        if not grader.same(got, {"value": gaps(*case)}):
            raise grader.Failed(f"gaps{tuple(case)} gave {got}, not {gaps(*case)}")


grader.main(verify)
