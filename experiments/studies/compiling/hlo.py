"""Reads the text of a compiled program: its instructions by computation, with shapes and bytes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_GIVEN = ("parameter", "constant")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array's shape and type; `in_hbm`: not in a chip's small memories."""

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool

    @property
    def nbytes(self) -> float:
        """Bytes without padding."""
        if self.dtype in ("token", "opaque"):
            return 0.0
        found = re.search(r"\d+", self.dtype)
        bits = int(found[0]) if found else 8
        return math.prod(self.shape) * bits / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction; `operands` are names there, a parameter's number or a constant's value."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it names, branches not included."""
        return tuple(_CALLED.findall(self.attributes))

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of which it runs one."""
        found = _BRANCHES.search(self.attributes)
        return tuple(_NAME.findall(found[1])) if found else ()

    def nested(self, name: str) -> str | None:
        """The computation that this attribute names."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, and the one that it begins with."""

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """The module that the text of a compiled program describes.

    Example:
      >>> module = parse('''HloModule m
      ...
      ... ENTRY %main (x: f32[2,3]) -> f32[2,3] {
      ...   %x = f32[2,3]{1,0} parameter(0)
      ...   ROOT %y = f32[2,3]{1,0:T(8,128)S(1)} negate(%x)
      ... }
      ... ''')
      >>> module.computations[module.entry]["y"].operands
      ('x',)
      >>> [array.in_hbm for array in module.computations[module.entry]["y"].arrays]
      [False]
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header[2]
            computations[current] = {}
            entry = current if header[1] else entry
        elif _LINE.match(line):
            instruction = _instruction(line)
            computations[current][instruction.name] = instruction
    return Module(computations, entry)


def arrays_of(text: str) -> tuple[Array, ...]:
    """The arrays of a type, which may be a tuple of them."""
    return tuple(
        Array(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), "S(" not in layout)
        for dtype, dims, layout in _ARRAY.findall(text)
    )


def _instruction(line: str) -> Instruction:
    head = _LINE.match(line)
    assert head is not None
    rest = line[head.end() :]
    cut = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, tail = rest[cut:].strip().partition("(")
    end = _closing("(" + tail) - 1
    return Instruction(
        name=head[2],
        opcode=opcode,
        arrays=arrays_of(rest[:cut]),
        operands=(tail[:end],) if opcode in _GIVEN else tuple(_NAME.findall(tail[:end])),
        attributes=tail[end + 1 :],
        root=bool(head[1]),
    )


def _closing(text: str) -> int:
    """Where the parenthesis that the text begins with is closed."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")
