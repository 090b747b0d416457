"""Runs one config under several settings and seeds, one after another, and tables what came of it.

    python experiments/sweep.py --config experiments/configs/demo.py --workdir runs/staleness --set rl.steps=112 \\
        --vary staleness.tau=4,16 --vary learn.window=True,False --seeds 0,1,2 --json experiments/results/staleness.json

A run whose workdir is finished is not made again, so an interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

from glm_jax.report.metrics import read_metrics

FIGURE = "eval/exact_match"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--workdir", required=True, type=Path)
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=A,B", help="a key of the config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="the same in every run")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    keys = [v.split("=", 1)[0] for v in args.vary]
    choices = [v.split("=", 1)[1].split(",") for v in args.vary]
    rows = []
    for values in itertools.product(*choices):
        setting = dict(zip(keys, values, strict=True))
        results = []
        for seed in args.seeds.split(","):
            name = "-".join([*(f"{k.rpartition('.')[2]}_{v}" for k, v in setting.items()), f"seed_{seed}"])
            overrides = [f"{k}={v}" for k, v in setting.items()] + args.set + [f"seed={seed}"]
            results.append(_run(args.config, args.workdir / name, overrides))
        rows.append({"setting": setting, "runs": results})
        print(_row(rows[-1]), flush=True)
    print("\n" + table(keys, rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n")
    return 0


def _run(config: str, workdir: Path, overrides: list[str]) -> dict:
    """One training run; its held-out figure at the first and the last evaluation, and what its batches were like."""
    command = [sys.executable, "-m", "glm_jax", "train", "--config", config, "--workdir", str(workdir)]
    subprocess.run(command + [f"--config.{o}" for o in overrides], check=True, stdout=subprocess.DEVNULL)
    lines = read_metrics(workdir)
    evals = [line for line in lines if FIGURE in line]
    learned = [line for line in lines if "policy/dis_masked_share" in line]
    mean = lambda key: statistics.fmean(line[key] for line in learned if key in line)
    return {
        "first": evals[0][FIGURE],
        "last": evals[-1][FIGURE],
        "lag": mean("staleness/mean"),
        "masked": mean("policy/dis_masked_share"),
        "k3": mean("rollout/k3"),
    }


def _row(row: dict) -> str:
    runs = row["runs"]
    cell = lambda key: f"{statistics.fmean(r[key] for r in runs):.3f}"
    lasts = ", ".join(f"{r['last']:.3f}" for r in runs)
    lag, masked = statistics.fmean(r["lag"] for r in runs), statistics.fmean(r["masked"] for r in runs)
    name = " | ".join(row["setting"].values()) or "-"
    return f"| {name} | {cell('first')} | {cell('last')} | {lasts} | {lag:.2f} | {100 * masked:.3f} % |"


def table(keys: list[str], rows: list[dict]) -> str:
    """A Markdown table: settings, mean exact match before and after, after by seed, mean lag, DIS-masked share."""
    head = [*(keys or ["setting"]), "before", "after", "after, by seed", "mean lag", "outside the window"]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *map(_row, rows)])


if __name__ == "__main__":
    sys.exit(main())
