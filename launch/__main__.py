"""`python -m launch SCHEDULER --topology … --name … -- FLAGS OF glm-jax train`; with --print nothing is submitted."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from dataclasses import dataclass

from launch import jobset, queued, slurm, xpk
from launch.job import make_job
from launch.topology import FAMILIES, LaunchError, read

FAILED, USAGE = 1, 2


@dataclass(frozen=True)
class Submission:
    """A command, and the text that it reads."""

    command: list[str]
    text: str | None = None


def parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    known = ", ".join(FAMILIES)
    shared.add_argument("--topology", required=True, help=f"machine and shape, as v5p:8x8x8 or h100:16x8; {known}")
    shared.add_argument("--slices", type=int, default=1, help="TPU slices joined along the data axis")
    shared.add_argument("--name", required=True, help="of the job")
    shared.add_argument("--retries", type=int, default=10, help="starts after the first")
    shared.add_argument("--grace", type=int, default=300, help="seconds between SIGTERM and SIGKILL")
    shared.add_argument("--print", action="store_true", help="show what would be submitted, and submit nothing")
    google = argparse.ArgumentParser(add_help=False)
    google.add_argument("--zone", required=True)
    google.add_argument("--project", required=True)
    spot = argparse.ArgumentParser(add_help=False)
    spot.add_argument("--spot", action="store_true", help="machines that may be taken away at any time")
    image = argparse.ArgumentParser(add_help=False)
    image.add_argument("--image", required=True, help="container image that has glm-jax")
    prelude = argparse.ArgumentParser(add_help=False)
    prelude.add_argument("--prelude", default="", help="a line of shell for every host, before glm-jax")

    top = argparse.ArgumentParser(prog="python -m launch", description="What follows -- are flags of `glm-jax train`.")
    verbs = top.add_subparsers(dest="scheduler", required=True)
    verbs.add_parser(
        "queued", parents=[shared, google, spot, prelude], help="TPU VMs by queued resources"
    ).add_argument("--wait", type=int, default=86400, help="seconds that a request may stand in the queue")
    gke = verbs.add_parser("gke", parents=[shared, spot, image], help="TPUs or GPUs of a GKE cluster, as a JobSet")
    gke.add_argument("--claim", required=True, help="NAME:/PATH of the volume in which the workdir lies")
    gke.add_argument("--namespace", default="default")
    pods = verbs.add_parser("xpk", parents=[shared, google, spot, image], help="TPUs of a GKE cluster that xpk made")
    pods.add_argument("--cluster", required=True)
    pods.add_argument("--storage", required=True, help="storage of xpk in which the workdir lies")
    batch = verbs.add_parser("slurm", parents=[shared, prelude], help="GPU hosts by sbatch")
    batch.add_argument("--option", action="append", default=[], help="of the site, as --option=--partition=gpu")
    return top


def submission(argv: list[str]) -> tuple[Submission, bool]:
    """What to submit, and whether only to print it. Raises LaunchError."""
    at = argv.index("--") if "--" in argv else len(argv)
    args = parser().parse_args(argv[:at])
    topology = read(args.topology)
    job = make_job(args.name, topology, args.slices, argv[at + 1 :], args.retries, args.grace)
    if args.scheduler == "queued":
        text = queued.script(job, args.zone, args.project, args.prelude, args.spot, args.wait)
        return Submission(["bash", "-s"], text), args.print
    if args.scheduler == "gke":
        text = jobset.render(jobset.manifest(job, args.image, args.claim, args.namespace, args.spot))
        return Submission(["kubectl", "create", "-f", "-"], text), args.print
    if args.scheduler == "slurm":
        return Submission(["sbatch"], slurm.script(job, args.prelude, tuple(args.option))), args.print
    words = xpk.command(job, args.image, args.cluster, args.storage, args.zone, args.project, args.spot)
    return Submission(words), args.print


def main(argv: list[str]) -> int:
    try:
        found, only_print = submission(argv)
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return USAGE
    if only_print:
        print(shlex.join(found.command) if found.text is None else found.text, end="" if found.text else "\n")
        return 0
    try:
        return subprocess.run(found.command, input=found.text, text=True).returncode
    except FileNotFoundError:
        print(f"launch: {found.command[0]} is not on the PATH; --print shows what it would be given", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
