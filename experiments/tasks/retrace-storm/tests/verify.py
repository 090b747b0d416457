"""The plan is data: it is carried out here, counted here, and compared with the best one, which is computed here."""

import json
import sys

sys.path.insert(0, "/grader")
import grader  # noqa: E402

SLACK = 1.03


def least(lengths, tokens, shapes):
    """Cells of the best plan: after k widths, the least cells for each number of samples in the sorted order."""
    ordered = sorted(lengths)
    count = len(ordered)
    cost = [0] + [float("inf")] * count
    for _ in range(shapes):
        after = list(cost)
        for end in range(1, count + 1):
            width = ordered[end - 1]
            height = tokens // width
            area = height * width
            after[end] = min(cost[start] + -(-(end - start) // height) * area for start in range(end))
            after[end] = min(after[end], cost[end])
        cost = after
    return cost[count]


@grader.deadline()
def carry_out(batches, lengths, tokens):
    """(widths, cells) of a plan. Raises Failed where it is not legal."""
    if not isinstance(batches, list):
        raise grader.Failed("a plan is a list")
    seen, cells, widths = set(), 0, set()
    for batch in batches:
        if not isinstance(batch, dict) or batch.keys() != {"width", "rows"} or not isinstance(batch["rows"], list):
            raise grader.Failed(f"{str(batch)[:100]} is no batch")
        width, rows = batch["width"], batch["rows"]
        if type(width) is not int or not 1 <= width <= tokens:
            raise grader.Failed(f"{str(width)[:50]} is no width")
        if len(rows) > tokens // width:
            raise grader.Failed(f"{len(rows)} rows of width {width} are more than {tokens} tokens")
        for row in rows:
            if type(row) is not int or not 0 <= row < len(lengths) or row in seen:
                raise grader.Failed(f"{str(row)[:50]} is no sample, or stands in two batches")
            if lengths[row] > width:
                raise grader.Failed(f"a sample of {lengths[row]} tokens in a batch of width {width}")
            seen.add(row)
        cells += tokens // width * width
        widths.add(width)
    if len(seen) != len(lengths):
        raise grader.Failed(f"{len(lengths) - len(seen)} samples are in no batch")
    return widths, cells


def verify():
    rng = grader.rng()
    excess = []
    for count, tokens, shapes, mean in ((1, 512, 2, 40), (120, 2048, 2, 60), (260, 4096, 4, 70), (260, 4096, 8, 200)):
        lengths = [min(512, 1 + int(rng.expovariate(1 / mean))) for _ in range(count)]
        problem = json.dumps({"lengths": lengths, "tokens": tokens, "shapes": shapes}).encode()
        out = grader.output([grader.PYTHON, "-I", "/app/plan.py"], stdin=problem, timeout=15.0)
        widths, cells = carry_out(grader.parse(out), lengths, tokens)
        if len(widths) > shapes:
            raise grader.Failed(f"{len(widths)} shapes, {shapes} are allowed")
        total, best = sum(lengths), least(lengths, tokens, shapes)
        if cells - total > SLACK * (best - total):
            raise grader.Failed(
                f"{count} samples, {shapes} shapes: padding {cells - total}, the least is {best - total}"
            )
        excess.append((cells - total) / max(best - total, 1))
    return {"padding_over_least": max(excess)}


grader.main(verify)
