"""Reads a compiled program's text: its computations, and of each instruction the shapes, operands and attributes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}  # others say it in their names
_ARRAY = re.compile(r"(pred|token|opaque|[subfc]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Array(NamedTuple):
    """A shape as the compiler lays it out; `hbm` is False for what stands in on-chip memory."""

    dtype: str
    dims: tuple[int, ...]
    hbm: bool

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        if self.dtype in ("token", "opaque"):
            return 0
        bits = BITS.get(self.dtype) or int(re.search(r"\d+", self.dtype)[0])
        return -(-self.size * bits // 8)


class Instruction(NamedTuple):
    name: str
    op: str
    arrays: tuple[Array, ...]  # of its result, tuples opened
    operands: tuple[str, ...]
    attributes: str  # all that stands behind the opening parenthesis

    @property
    def scope(self) -> str:
        """The name stack of the traced code that it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        return _CALLED.findall(self.attributes)

    @property
    def branches(self) -> list[str]:
        found = _BRANCHES.search(self.attributes)
        return re.findall(r"[\w.-]+", found[1].replace("%", " ")) if found else []


class Computation(NamedTuple):
    instructions: dict[str, Instruction]
    root: str

    def hbm_bytes(self, name: str) -> int:
        return sum(a.bytes for a in self.instructions[name].arrays if a.hbm) if name in self.instructions else 0


class Program(NamedTuple):
    computations: dict[str, Computation]
    entry: str


def arrays(shape: str) -> tuple[Array, ...]:
    """Every array of a shape's text."""
    return tuple(
        Array(dtype, tuple(int(d) for d in dims.split(",") if d), "S(" not in (layout or ""))
        for dtype, dims, layout in _ARRAY.findall(shape)
    )


def parse(text: str) -> Program:
    computations: dict[str, Computation] = {}
    entry, name, found, root = "", "", {}, ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, found, root = header[2], {}, ""
            entry = name if header[1] else entry
        elif line.startswith("}") and name:
            computations[name], name = Computation(found, root), ""
        elif name and (start := _INSTRUCTION.match(line)):
            found[start[2]] = _instruction(start[2], line[start.end() :])
            root = start[2] if start[1] else root
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    op, _, rest = rest.partition("(")
    end = _closing("(" + rest, 0) - 1
    return Instruction(name, op, arrays(shape), tuple(re.findall(r"%([\w.-]+)", rest[:end])), rest)


def _closing(text: str, start: int) -> int:
    """Just behind the parenthesis that closes the one at `start`."""
    depth = 0
    for place in _parentheses(text, start):
        depth += 1 if text[place] == "(" else -1
        if depth == 0:
            return place + 1
    return len(text)


def _parentheses(text: str, start: int) -> Iterator[int]:
    return (match.start() for match in re.compile(r"[()]").finditer(text, start))


def trips(program: Program, where: Computation, loop: Instruction) -> int | None:
    """How often a while loop's body runs, if the program says so: outright, or by a test `i < n` or `i >= n`."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", loop.attributes)[1]
    test = program.computations[condition]
    root = test.instructions[test.root]
    if root.op != "compare":
        return None
    counter, bound = (test.instructions[name] for name in root.operands)
    index = re.search(r"index=(\d+)", counter.attributes)
    if counter.op != "get-tuple-element" or bound.op != "constant" or index is None:
        return None
    last = constant(bound)
    start = where.instructions.get(loop.operands[0])
    first = _follow(where, start.operands[int(index[1])]) if start and start.op == "tuple" else None
    if last is not None and "direction=LT" in root.attributes:
        return last - (first or 0)
    if last is not None and first is not None and "direction=GE" in root.attributes:
        return first - last + 1
    return None


def _follow(where: Computation, name: str) -> int | None:
    """The constant that a copy, or a copy of a copy, holds."""
    while name in where.instructions:
        instruction = where.instructions[name]
        if instruction.op == "constant":
            return constant(instruction)
        if instruction.op not in ("copy", "bitcast", "copy-done", "copy-start"):
            return None
        name = instruction.operands[0]
    return None


def constant(instruction: Instruction) -> int | None:
    found = re.match(r"(-?\d+)\)", instruction.attributes)
    return int(found[1]) if found else None
