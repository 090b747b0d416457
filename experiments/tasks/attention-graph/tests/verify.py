"""The candidate's code makes a graph; the graph is counted and run where that code is not."""

import io
import sys

sys.path.insert(0, "/grader")
import grader  # noqa: E402
import numpy as np  # noqa: E402

WINDOW, OPERATIONS, TOLERANCE = 16, 60, 2e-5


def exact(q, k, v):
    """Row by row in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(v)
    for h in range(q.shape[0]):
        for s in range(q.shape[1]):
            seen = slice(max(0, s - WINDOW + 1), s + 1)
            logits = k[h, seen] @ q[h, s] / q.shape[2] ** 0.5
            weights = np.exp(logits - logits.max())
            out[h, s] = weights @ v[h, seen] / weights.sum()
    return out


def draw(rng, shape):
    """Ordinary inputs; large logits, spaced so that float32 knows the largest; one token that outshines all."""
    ordinary = [rng.normal(size=shape) for _ in range(3)]
    direction = rng.normal(size=shape[2])
    scale = np.abs(direction @ direction) / shape[2] ** 0.5
    steps = rng.permuted(np.tile(np.arange(shape[1]) - shape[1] / 2, (shape[0], 1)), axis=1)
    large = [np.broadcast_to(direction, shape), 200 / scale * steps[..., None] * direction, rng.normal(size=shape)]
    beacon = [np.abs(rng.normal(size=shape)), rng.normal(size=shape), rng.normal(size=shape)]
    beacon[1][:, shape[1] // 3] = 30.0
    return [[x.astype(np.float32) for x in case] for case in (ordinary, large, beacon)]


def judge(rng, sizes):
    cases = draw(rng, sizes)
    argv = [grader.PYTHON, "-I", "-c", source("export.py"), *map(str, sizes)]
    graph = grader.output(argv, timeout=40.0)
    inputs = io.BytesIO()
    np.savez(inputs, **{f"{name}{i}": x for i, case in enumerate(cases) for name, x in zip("qkv", case, strict=True)})
    files = {"graph": graph, "inputs.npz": inputs.getvalue()}
    argv = [grader.PYTHON, "-I", "-c", source("evaluate.py")]
    found = grader.parse(grader.output(argv, files=files, timeout=40.0))
    if "refused" in found:
        raise grader.Failed(found["refused"])
    heads, length, width = sizes
    if found["operations"] > OPERATIONS or found["products"] > 2 * heads * length**2 * width:
        raise grader.Failed(f"{found['operations']} operations, {found['products']} multiplications")
    return found["operations"], distance(cases, found["results"])


@grader.deadline()
def distance(cases, results):
    """The largest error of all cases, relative to the largest value of each. Raises Failed where it is too large."""
    errors = []
    for case, got in zip(cases, results, strict=True):
        want = exact(*case)
        got = np.asarray(got)
        if got.shape != want.shape or not np.isfinite(got).all():
            raise grader.Failed(f"the result has the shape {got.shape}, or values that are not finite")
        errors.append(np.abs(got - want).max() / np.abs(want).max())
    if max(errors) > TOLERANCE:
        raise grader.Failed(f"relative errors of {[f'{error:.1e}' for error in errors]}")
    return max(errors)


def source(name):
    with open(f"/tests/{name}") as file:
        return file.read()


def verify():
    rng = np.random.default_rng(grader.seed())
    sizes = int(rng.integers(3, 6)), int(rng.integers(30, 49)), int(rng.choice((8, 16, 32)))
    operations, error = judge(rng, sizes)
    return {"operations": operations, "error": float(error)}


grader.main(verify)
