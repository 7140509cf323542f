"""What a compiled program does on one chip: matmul operations, HBM traffic, collectives; loops counted fully.

XLA's own `cost_analysis()` counts the body of a loop once. It does not see into Pallas kernels: their
operations are counted from the traced program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from experiments.studies.compiling.hlo import Array, Computation, Instruction, Module

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_ACROSS_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_LISTED_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"}
_FREE |= {"replica-id", "iota", "while", "conditional", "call", "opt-barrier", "async-start", "async-update"}


@dataclasses.dataclass(frozen=True)
class CollectiveTraffic:
    """A collective: bytes that a chip sends in one go of it, in a group of so many chips, and how often.

    `dcn`: to other slices, over the data-center network; else to chips of its own, over the interconnect.
    """

    kind: str
    nbytes: float
    group: int
    times: float = 1.0
    dcn: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
    """Sums of one chip; a collective in stages, which are several instructions, counts once."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: dict[str, CollectiveTraffic] = dataclasses.field(default_factory=dict)
    endless: int = 0
    """Loops that count once, since how often they run is not known."""

    def __add__(self, other: Cost) -> Cost:
        both = dict(self.collectives)
        for key, traffic in other.collectives.items():
            if key not in both or both[key].times < traffic.times:
                both[key] = traffic
        return Cost(
            self.flops + other.flops, self.hbm_bytes + other.hbm_bytes, both, self.endless + other.endless
        )

    def repeated(self, times: float) -> Cost:
        """The cost of so many turns."""
        repeated = {
            key: dataclasses.replace(traffic, times=times * traffic.times)
            for key, traffic in self.collectives.items()
        }
        return Cost(times * self.flops, times * self.hbm_bytes, repeated, self.endless)

    def bytes_by_kind(self, dcn: bool = False) -> dict[str, float]:
        """Bytes that a chip sends to others of its slice, or to other slices, by kind of collective."""
        found = dict.fromkeys(COLLECTIVES, 0.0)
        for traffic in self.collectives.values():
            if traffic.dcn == dcn:
                found[traffic.kind] += traffic.times * traffic.nbytes
        return found


def cost_of(module: Module, chips: int, slices: int = 1) -> Cost:
    """The cost of a program on each chip, of so many in all slices; Pallas kernels count nothing."""
    return _Walk(module, chips, slices).cost(module.entry, False)


class _Walk:
    """Each computation is looked at once."""

    def __init__(self, module: Module, chips: int, slices: int) -> None:
        self._module, self._chips, self._slices = module, chips // slices, slices
        self.cost = functools.cache(self._cost)

    def _cost(self, name: str, fused: bool) -> Cost:
        """`fused`: its instructions touch no memory of their own."""
        computation, total = self._module.computations[name], Cost()
        for instruction in computation.values():
            total += self._own(instruction, computation, fused, name)
        return total

    def _own(self, i: Instruction, computation: Computation, fused: bool, within: str) -> Cost:
        cost = Cost()
        kind = i.opcode.removesuffix("-start")
        if kind == "all-reduce" and within.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # as TPU programs write it
        if i.opcode == "while":
            turns = self._turns(i, computation)
            inner = functools.reduce(Cost.__add__, (self.cost(name, False) for name in i.called))
            return inner.repeated(turns or 1) + Cost(endless=turns is None)
        if i.opcode == "conditional":
            names = i.branches or i.called
            return max((self.cost(name, False) for name in names), key=lambda cost: cost.flops)
        if i.opcode in ("call", "fusion", "async-start"):
            cost = functools.reduce(
                Cost.__add__, (self.cost(name, fused or i.opcode == "fusion") for name in i.called), cost
            )
        elif kind in COLLECTIVES:
            cost = self._collective(kind, i, computation)
        elif i.opcode == "send" and (across := _ACROSS_SLICES.search(i.attributes)):
            cost = self._across_slices(across[1].lower().replace("_", "-"), i, computation)
        elif i.opcode in ("dot", "convolution"):
            cost = Cost(_matmul_flops(i, [computation[name].arrays[0] for name in i.operands]))
        if not fused and i.opcode not in _FREE and not i.opcode.endswith("-done"):
            cost += Cost(hbm_bytes=self._traffic(i, computation))
        return cost

    def _turns(self, loop: Instruction, computation: Computation) -> int | None:
        """How often a loop runs: as XLA says, or as its counter goes up; None: it is not known."""
        if found := _TRIPS.search(loop.attributes):
            return int(found[1])
        condition, body = (self._module.computations[loop.nested(name)] for name in ("condition", "body"))
        test = _root(condition)
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        counter, limit = condition[test.operands[0]], _integer(test.operands[1], condition)
        place = re.search(r"\bindex=(\d+)", counter.attributes)
        given, made = computation[loop.operands[0]], _root(body)
        if limit is None or place is None or not given.opcode == made.opcode == "tuple":
            return None
        begin = _integer(given.operands[int(place[1])], computation)
        step = body[made.operands[int(place[1])]]
        steps = [_integer(name, body) for name in step.operands] if step.opcode == "add" else []
        size = next((n for n in steps if n), None)
        return None if begin is None or size is None else -(-(limit - begin) // size)

    def _collective(self, kind: str, i: Instruction, computation: Computation) -> Cost:
        given = sum(array.nbytes for name in i.operands for array in computation[name].arrays)
        group = _group(i.attributes, self._chips)
        # The stages of a collective that goes on beside matmuls share a chain and a channel.
        chain, channel = _CHAIN.search(i.attributes), _CHANNEL.search(i.attributes)
        key = f"{chain[1]} {channel[1]}" if chain and channel else i.name
        return Cost(collectives={key: CollectiveTraffic(kind, given * _share(kind, group), group)})

    def _across_slices(self, kind: str, i: Instruction, computation: Computation) -> Cost:
        """A chip hands its part to its host, and the hosts do the rest, as a ring of slices would."""
        kind = kind if kind in COLLECTIVES else "collective-permute"
        given = computation[i.operands[0]].arrays[0].nbytes
        traffic = CollectiveTraffic(kind, given * _share(kind, self._slices), self._slices, dcn=True)
        return Cost(collectives={i.name: traffic})

    def _traffic(self, i: Instruction, computation: Computation) -> float:
        """Bytes read from and written to HBM: of slices and updates in place only what they touch."""
        inner = i.nested("calls") if i.opcode == "fusion" else None
        read = 0.0
        for number, name in enumerate(i.operands):
            whole = _hbm_bytes(computation[name].arrays)
            if inner is not None:
                read += min(whole, self._read(inner, number))
            elif i.opcode in ("dynamic-slice", "slice", "gather") and number == 0:
                read += _hbm_bytes(i.arrays)
            elif i.opcode != "dynamic-update-slice" or number > 0:
                read += whole
        if i.opcode == "dynamic-update-slice":
            return read + _hbm_bytes(computation[i.operands[1]].arrays)
        arrays, given = i.arrays, len(i.operands)
        if i.opcode == "send":
            return _hbm_bytes(computation[i.operands[0]].arrays)
        if i.opcode in ("all-gather-start", "collective-permute-start"):
            arrays = arrays[given : 2 * given]  # before them stand the operands, after them what else it has
        elif i.opcode.endswith("-start") or i.opcode == "recv":
            arrays = arrays[:1]
        return read + (self._written(inner, i) if inner is not None else _hbm_bytes(arrays))

    def _read(self, name: str, number: int) -> float:
        """Bytes that a fused computation reads of its parameter, if all of it lay in HBM."""
        computation = self._module.computations[name]
        parameter = next(
            i for i in computation.values() if i.opcode == "parameter" and i.operands == (str(number),)
        )
        return self._used(parameter, computation)

    def _used(self, value: Instruction, computation: Computation) -> float:
        total, whole = 0.0, sum(array.nbytes for array in value.arrays)
        for user in computation.values():
            if user.opcode == "parameter" or value.name not in user.operands:
                continue
            if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == value.name:
                total += sum(array.nbytes for array in user.arrays)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
                continue
            elif user.opcode == "bitcast":
                total += self._used(user, computation)
            elif user.opcode == "fusion":
                total += self._read(user.called[0], user.operands.index(value.name))
            else:
                return whole
        return min(total, whole)

    def _written(self, name: str, fusion: Instruction) -> float:
        """Bytes that a fusion writes: of an array that it updates in place, the update."""
        computation = self._module.computations[name]
        root = _root(computation)
        parts = [computation[part] for part in root.operands] if root.opcode == "tuple" else [root]
        if len(parts) != len(fusion.arrays):
            return _hbm_bytes(fusion.arrays)
        return sum(
            self._update_bytes(part, computation) if array.in_hbm else 0.0
            for part, array in zip(parts, fusion.arrays, strict=True)
        )

    def _update_bytes(self, part: Instruction, computation: Computation) -> float:
        while part.opcode == "bitcast":
            part = computation[part.operands[0]]
        if part.opcode == "dynamic-update-slice":
            return sum(array.nbytes for array in computation[part.operands[1]].arrays)
        if part.opcode == "fusion":
            inner = self._module.computations[part.called[0]]
            return self._update_bytes(_root(inner), inner)
        return sum(array.nbytes for array in part.arrays)


def _root(computation: Computation) -> Instruction:
    return next(i for i in computation.values() if i.root)


def _integer(name: str, computation: Computation) -> int | None:
    """The value of a constant, also behind copies of it."""
    found = computation[name]
    while found.opcode in ("copy", "bitcast", "copy-start", "copy-done"):
        found = computation[found.operands[0]]
    text = found.operands[0] if found.opcode == "constant" else ""
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _hbm_bytes(arrays: Sequence[Array]) -> float:
    return sum(array.nbytes for array in arrays if array.in_hbm)


def _matmul_flops(i: Instruction, operands: Sequence[Array]) -> float:
    left, right = operands[0].shape, operands[1].shape
    if i.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
        contracted = [int(n) for n in found[1].split(",") if n] if found else []
        return 2.0 * math.prod(i.arrays[0].shape) * math.prod(left[n] for n in contracted)
    labels = _LABELS.search(i.attributes)
    assert labels is not None
    inputs, kernel, outputs = labels.groups()
    groups = re.search(r"batch_group_count=(\d+)", i.attributes)
    rows = left[inputs.index("b")] / (int(groups[1]) if groups else 1)
    count = rows * right[kernel.index("i")] * right[kernel.index("o")]
    window = _window(i.attributes)
    for axis in filter(str.isdigit, inputs):
        count *= _valid_positions(
            left[inputs.index(axis)],
            i.arrays[0].shape[outputs.index(axis)],
            *(window[name][int(axis)] for name in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")),
        )
    return 2.0 * count


def _window(attributes: str) -> dict[str, list[tuple[int, ...]]]:
    """The window's numbers by name and spatial axis, defaults filled in."""
    found = _WINDOW.search(attributes)
    given = dict(part.split("=") for part in found[1].split()) if found else {}
    axes = len(given["size"].split("x")) if given else 0
    defaults = {"size": "1", "stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
    written = {
        name: given[name].split("x") if name in given else [usual] * axes for name, usual in defaults.items()
    }
    return {name: [tuple(map(int, n.split("_"))) for n in numbers] for name, numbers in written.items()}


def _valid_positions(
    inputs: int,
    outputs: int,
    size: tuple[int],
    stride: tuple[int],
    pad: tuple[int, int],
    lhs_dilate: tuple[int],
    rhs_dilate: tuple[int],
) -> int:
    """The pairs of an output and a place in the window that meet an input, not padding or a gap.

    TPU programs have batched matmuls as convolutions that mostly meet padding.
    """
    at = np.arange(outputs)[:, None] * stride[0] - pad[0] + np.arange(size[0]) * rhs_dilate[0]
    return int(((at >= 0) & (at <= (inputs - 1) * lhs_dilate[0]) & (at % lhs_dilate[0] == 0)).sum())


def _share(kind: str, group: int) -> float:
    """The bytes that each sends, of those that it has."""
    shares = {"all-gather": group - 1.0, "all-reduce": 2 * (group - 1) / group, "collective-permute": 1.0}
    return shares.get(kind, (group - 1) / group)


def _group(attributes: str, chips: int) -> int:
    """The number of chips in a group."""
    if found := _LISTED_GROUP.search(attributes):
        return len(found[1].split(","))
    if found := _IOTA_GROUPS.search(attributes):
        return int(found[1])
    if found := _MESH_GROUPS.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        named = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part) if part else sizes[name] for name, part in named)
    return chips


def kernel_flops(jaxpr: core.Jaxpr, chips: int) -> float:
    """Matmul operations of all Pallas kernels on one chip.

    A block that a kernel may skip counts as not skipped, so that a causal mask makes no difference.
    """
    return _flops(jaxpr, chips, inside=False)


def _flops(jaxpr: core.Jaxpr, chips: int, inside: bool) -> float:
    return sum(_of_equation(equation, chips, inside) for equation in jaxpr.eqns)


def _of_equation(equation: core.JaxprEqn, chips: int, inside: bool) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation) / chips if inside else 0.0
    if name == "pallas_call":
        turns = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
        return turns * _flops(params["jaxpr"], chips, inside=True)
    if name == "shard_map":  # whose body is one chip's share
        chips = 1
    found = [_flops(inner, chips, inside) for inner in _jaxprs(params)]
    if name == "cond":
        return max(found)
    return params.get("length", 1) * sum(found) if name == "scan" else sum(found)


def _dot_flops(equation: core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(result) * math.prod(left[axis] for axis in contracted)


def _jaxprs(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
