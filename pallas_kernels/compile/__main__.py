"""python -m pallas_kernels.compile report [--json FILE] [--device NAME ...] [--kernel NAME ...]
python -m pallas_kernels.compile device"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.gpus import GPUS
from pallas_kernels.compile.report import report, table
from pallas_kernels.compile.tpus import TPUS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("report", help="compile every kernel for every device and print what the compiler says")
    names, devices = sorted({case.kernel for case in CASES.values()}), [*TPUS, *GPUS]
    verb.add_argument("--kernel", nargs="+", choices=names, default=names)
    verb.add_argument("--device", nargs="+", choices=devices, default=devices)
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    verbs.add_parser("device", help="check and time the GPU kernels on the GPU at hand, where there is one")
    args = parser.parse_args()
    if args.verb == "device":
        from pallas_kernels.compile import device

        print(device.main())
        return
    found = report(args.kernel, args.device)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
