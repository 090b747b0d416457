"""python -m pallas_kernels.compile report [--json FILE] [--device NAME ...] [--kernel NAME ...]"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.devices import DEVICES
from pallas_kernels.compile.report import libtpu, report, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.compile", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("report", help="compile every kernel for every device and print the compiler's schedule")
    names = sorted({case.kernel for case in CASES.values()})
    verb.add_argument("--kernel", nargs="+", choices=names, default=names)
    verb.add_argument("--device", nargs="+", choices=list(DEVICES), default=list(DEVICES))
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    libtpu()
    found = report(args.kernel, args.device)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
