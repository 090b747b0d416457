"""What a compiled program costs a device: operations, bytes of HBM, cycles, and collectives by kind and mesh axes.

Everything is counted on the compiler's result, loops times their trips, phase by phase. Loops whose length the program
does not know begin a phase of their own, told per pass: a tick of decoding, a step of prefill. Of the branches of a
conditional the costliest counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from glm_jax.plan.errors import PlanError
from glm_jax.plan.hlo import Array, Computation, Instruction, Program, trips

TICK, PREFILL, LEARN, ONCE = "decode tick", "prefill step", "learning step", "once a round"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all")
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place, and which operand is the update
_SAME = ("bitcast", "reshape")


@dataclass
class Cost:
    """Of one phase on one device."""

    flops: float = 0.0  # of products of matrices, multiply and add apart
    hbm_bytes: float = 0.0
    cycles: float = 0.0  # the TPU compiler's own estimate
    collectives: Counter = field(default_factory=Counter)  # (kind, axes) -> bytes that leave or reach a device
    calls: Counter = field(default_factory=Counter)  # (kind, axes) -> how many
    uncounted: set[str] = field(default_factory=set)  # kernels whose operations (on a GPU: and reads) nobody told

    def add(self, other: Cost, times: float) -> None:
        self.flops += times * other.flops
        self.hbm_bytes += times * other.hbm_bytes
        self.cycles += times * other.cycles
        for mine, theirs in ((self.collectives, other.collectives), (self.calls, other.calls)):
            for key, value in theirs.items():
                mine[key] += times * value
        self.uncounted |= other.uncounted


Phases = dict[str, Cost]


def of_program(program: Program, mesh: dict[str, int], micro_batches: int) -> Phases:
    """Costs by phase. `mesh` are the sizes of its axes in order; a learning step runs all its micro-batches."""
    return _Reader(program, mesh, micro_batches).computation(program.entry, ONCE)


@dataclass
class _Reader:
    program: Program
    mesh: dict[str, int]
    micro_batches: int

    def computation(self, name: str, phase: str) -> Phases:
        where, phases = self.program.computations[name], {}
        seen: set[str] = set()  # chains: an asynchronous collective stands in each of its parts
        for instruction in where.instructions.values():
            if instruction.op == "while":
                inner, times = self._loop(where, instruction, phase)
                _merge(phases, self.computation(_body(instruction), inner), times)
            elif instruction.op == "conditional":
                inner = LEARN if "/learn/" in instruction.scope and phase == ONCE else phase
                names = instruction.branches or instruction.called
                branches = [self.computation(branch, inner) for branch in names]
                _merge(phases, max(branches, key=_weight), 1)
            elif instruction.op == "call":
                for called in instruction.called:
                    _merge(phases, self.computation(called, phase), 1)
            else:
                here = LEARN if "/learn/" in instruction.scope and phase == ONCE else phase
                self._instruction(where, instruction, phases.setdefault(here, Cost()), seen)
        return phases

    def _loop(self, where: Computation, loop: Instruction, phase: str) -> tuple[str, int]:
        """The phase of a loop's body, and how often it runs."""
        known = trips(self.program, where, loop)
        if known is not None:
            return phase, known
        if phase == ONCE and "/sample/" in loop.scope:
            return TICK, 1
        if phase == TICK and "/prefill/" in loop.scope:
            return PREFILL, 1
        if phase == LEARN:
            return phase, self.micro_batches
        return phase, 1

    def _instruction(self, where: Computation, instruction: Instruction, cost: Cost, seen: set[str]) -> None:
        self._work(where, instruction, cost, seen)
        if instruction.op not in _FREE:
            cost.hbm_bytes += self._bytes(where, instruction)
        if estimate := re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes):
            cost.cycles += int(estimate[1])

    def _work(self, where: Computation, instruction: Instruction, cost: Cost, seen: set[str]) -> None:
        """Operations and collectives, also of what is fused into the instruction or starts with it."""
        op = instruction.op.removesuffix("-start")
        if op in KINDS:
            # Channels of a shard_map may have one number; the parts of a chain have all of them one chain.
            chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
            name = chain[0] if chain else instruction.name
            if name not in seen:
                seen.add(name)
                key = op, self._axes(instruction)
                cost.collectives[key] += moved(op, where, instruction, self._group(instruction))
                cost.calls[key] += 1
        elif op in ("dot", "convolution"):
            cost.flops += flops(where, instruction)
        elif "ragged-dot" in instruction.name and instruction.op == "custom-call":
            cost.flops += ragged_flops(where, instruction)
        elif 'custom_call_target="tpu_custom_call"' in instruction.attributes:
            told = re.search(r'"flops":"?(\d+)', instruction.attributes)
            cost.flops += int(told[1]) if told else 0
            if not told and "ragged-dot" not in instruction.name:
                cost.uncounted.add(re.sub(r"[.\d]+$", "", instruction.name))
        elif of_gpu := re.search(r'custom_call_target="(__cu\w+|__gpu)\$', instruction.attributes):
            cost.uncounted.add(of_gpu[1].strip("_"))
        if op in ("fusion", "async"):
            for called in instruction.called:
                inside = self.program.computations[called]
                for each in inside.instructions.values():
                    self._work(inside, each, cost, seen)

    def _bytes(self, where: Computation, instruction: Instruction) -> int:
        """HBM that the instruction reads and writes; of an array that it takes slices of, the slices."""
        op, result = instruction.op, where.hbm_bytes(instruction.name)
        if op.endswith("-done"):
            return result if op != "async-done" else 0
        if op in _SLICES:
            return 2 * result
        if op in _UPDATES:
            return 2 * where.hbm_bytes(instruction.operands[_UPDATES[op]])
        told = re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes)
        if op == "custom-call" and told:
            return int(told[1])
        if 'custom_call_target="__gpu$' in instruction.attributes:
            return result  # which rows a kernel gathers from its operands the program does not say
        if op != "fusion":
            return sum(map(where.hbm_bytes, instruction.operands)) + (0 if op.endswith("-start") else result)
        return self._bytes_of_fusion(where, instruction, result)

    def _bytes_of_fusion(self, where: Computation, fusion: Instruction, result: int) -> int:
        """Of an array that is updated in place the update counts; what has another shape only is the same array."""
        inside = self.program.computations[fusion.called[0]].instructions
        root = inside[_origin(inside, self.program.computations[fusion.called[0]].root)]
        total, updated = result, None
        if root.op in _UPDATES:
            updated = _origin(inside, root.operands[0])
            total = 2 * sum(a.bytes for a in inside[root.operands[_UPDATES[root.op]]].arrays)
        for parameter in (i for i in inside.values() if i.op == "parameter"):
            whole = where.hbm_bytes(fusion.operands[int(parameter.attributes.split(")")[0])])
            if not whole or parameter.name == updated:
                continue
            reads = [
                (user, name)
                for user in inside.values()
                for name in user.operands
                if user.op not in _SAME and name in inside and _origin(inside, name) == parameter.name
            ]
            if reads and all(user.op in _SLICES and user.operands[0] == name for user, name in reads):
                whole = min(whole, sum(a.bytes for user, _ in reads for a in user.arrays))
            total += whole
        return total

    def _group(self, instruction: Instruction) -> list[int]:
        """The devices of one group, in the mesh's order."""
        return groups(instruction.attributes, math.prod(self.mesh.values()))

    def _axes(self, instruction: Instruction) -> str:
        """The mesh axes along which a collective goes."""
        places = np.unravel_index(self._group(instruction), tuple(self.mesh.values()))
        names = [axis for axis, place in zip(self.mesh, places, strict=True) if len(set(place.tolist())) > 1]
        return "+".join(names) or "none"


def _origin(inside: dict[str, Instruction], name: str) -> str:
    """What a value was before it got another shape."""
    while inside[name].op in _SAME:
        name = inside[name].operands[0]
    return name


def _body(loop: Instruction) -> str:
    return re.search(r"body=%?([\w.-]+)", loop.attributes)[1]


def _merge(phases: Phases, more: Phases, times: float) -> None:
    for name, cost in more.items():
        phases.setdefault(name, Cost()).add(cost, times)


def _weight(phases: Phases) -> tuple[float, float]:
    return sum(c.flops for c in phases.values()), sum(c.hbm_bytes for c in phases.values())


def groups(attributes: str, devices: int) -> list[int]:
    """The first of a collective's groups: as a list, as a grid of all devices turned and cut into rows, or the ends of
    the first permuted pair that goes anywhere."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        ends = [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{?([\d,]+)", pairs[1]) if pair.strip(",")]
        return next((pair for pair in ends if len(set(pair)) > 1), [0])
    if grid := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, over, turn = ([int(n) for n in part.split(",")] if part else None for part in grid.groups())
        return np.arange(devices).reshape(over).transpose(turn).reshape(shape)[0].tolist()
    if named := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? ?\{([^}]*)\}", attributes
    ):
        sizes, over, turn, along = named.groups()
        axes = dict(re.findall(r"'(\w+)'=(\d+)", sizes))
        numbers = lambda text: [int(n) for n in text.split(",")]
        ids = np.arange(devices).reshape(numbers(over)).transpose(numbers(turn)) if over else np.arange(devices)
        chosen = re.findall(r"'(\w+)'", along)
        return (
            ids.reshape([int(n) for n in axes.values()])[tuple(slice(None) if a in chosen else 0 for a in axes)]
            .ravel()
            .tolist()
        )
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return [int(n) for n in listed[1].split(",")]
    if "replica_groups={}" in attributes or "replica_groups" not in attributes:
        return list(range(devices))
    raise PlanError(f"a collective's groups are written in a way that is not known: {attributes[:300]}")


def moved(kind: str, where: Computation, collective: Instruction, group: list[int]) -> float:
    """Bytes that one device sends to the others at least."""
    sent = sum(
        a.bytes for name in collective.operands if name in where.instructions for a in where.instructions[name].arrays
    )
    others = (len(group) - 1) / len(group)
    if kind == "all-gather":
        return sent * (len(group) - 1)
    if kind == "all-reduce":
        return 2 * sent * others
    return sent if kind == "collective-permute" else sent * others


def flops(where: Computation, product: Instruction) -> float:
    """Of a dot or a convolution; positions of a window that fall on padding or between dilated inputs do nothing."""
    left, right = (where.instructions[name].arrays[0] for name in product.operands[:2])
    (out,) = product.arrays
    if product.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.attributes)[1]
        return 2.0 * out.size * math.prod(left.dims[int(d)] for d in contracted.split(",") if d)
    a, b, c = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", product.attributes).groups()
    window = _window(product.attributes)
    total = 2.0 * out.dims[c.index("b")] * out.dims[c.index("f")] * right.dims[b.index("i")]
    for n, how in enumerate(window):
        label = str(n)
        total *= _pairs(left.dims[a.index(label)], right.dims[b.index(label)], out.dims[c.index(label)], **how)
    return total


def _window(attributes: str) -> list[dict[str, int]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in found[1].split()) if found else {}
    count = len(fields.get("size", "").split("x")) if "size" in fields else 0
    pick = lambda name, n, default: fields[name].split("x")[n] if name in fields else default
    return [
        {
            "stride": int(pick("stride", n, "1")),
            "low": int(pick("pad", n, "0_0").split("_")[0]),
            "left_dilation": int(pick("lhs_dilate", n, "1")),
            "right_dilation": int(pick("rhs_dilate", n, "1")),
        }
        for n in range(count)
    ]


def _pairs(size: int, kernel: int, out: int, stride: int, low: int, left_dilation: int, right_dilation: int) -> int:
    """(output, kernel) positions that meet an input."""
    place = np.arange(out)[:, None] * stride - low + np.arange(kernel) * right_dilation
    inside = (place >= 0) & (place <= (size - 1) * left_dilation) & (place % left_dilation == 0)
    return int(np.count_nonzero(inside))


def ragged_flops(where: Computation, product: Instruction) -> float:
    """Of a product of rows with the matrix of their group, or of rows with rows, group by group; all rows counted."""
    floats = [
        array
        for name in product.operands
        if name in where.instructions
        for array in where.instructions[name].arrays
        if array.dtype in ("bf16", "f32", "f16") and len(array.dims) >= 2
    ]
    out = next((a for a in product.arrays if a.dtype in ("bf16", "f32", "f16")), Array("f32", (), True))
    if not floats:
        return 0.0
    rows, inner = floats[0].dims[-2:]
    return 2.0 * rows * out.size / out.dims[0] if len(out.dims) == 3 else 2.0 * out.size * inner


def plain(cost: Cost) -> dict:
    """For JSON: collectives as rows."""
    rows = [
        {"kind": kind, "axes": axes, "calls": cost.calls[kind, axes], "bytes": moved}
        for (kind, axes), moved in sorted(cost.collectives.items(), key=lambda item: -item[1])
    ]
    figures = {"flops": cost.flops, "hbm_bytes": cost.hbm_bytes, "cycles": cost.cycles}
    return {**figures, "collectives": rows, "uncounted": sorted(cost.uncounted)}


def largest(program: Program, count: int = 12) -> list[dict]:
    """The largest values in HBM that instructions make, each shape and origin once."""
    found: dict[tuple, int] = {}
    fused = {
        called
        for c in program.computations.values()
        for i in c.instructions.values()
        if i.op == "fusion"
        for called in i.called
    }
    for name, where in program.computations.items():
        for instruction in where.instructions.values() if name not in fused else ():
            in_place = instruction.op in ("dynamic-update-slice", *_FREE) or instruction.op.endswith("-done")
            for array in () if in_place else instruction.arrays:
                if array.hbm:
                    key = (instruction.op, f"{array.dtype}{list(array.dims)}", instruction.scope)
                    found[key] = max(found.get(key, 0), array.bytes)
    top = sorted(found.items(), key=lambda item: -item[1])[:count]
    return [{"bytes": size, "op": op, "shape": shape, "from": scope} for (op, shape, scope), size in top]
