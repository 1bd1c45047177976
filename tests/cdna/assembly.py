"""The text that Triton's AMD code generator writes, as instructions, labels and metadata."""

import dataclasses
import re
import struct
from dataclasses import dataclass
from typing import Any

from cdna.bits import EmulationError

VCC, M0, EXEC = 106, 124, 126
NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "m0": (M0, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
}
AGPRS = 256  # where the accumulation registers stand in the unified file
CLASSES = (
    ("mfma", r"v_mfma_"),
    ("async", r"(global|buffer)_load.*(\blds$|_lds_)"),
    ("load", r"(global|buffer)_load_"),
    ("store", r"(global|buffer)_store_"),
    ("lds_read", r"ds_read"),
    ("lds_write", r"ds_write"),
    ("lds_exchange", r"ds_"),
    ("wait", r"s_waitcnt"),
    ("barrier", r"s_barrier"),
    ("nop", r"s_nop"),
    ("scalar", r"s_"),
    ("vector", r"v_"),
)


@dataclass(frozen=True)
class Operand:
    """A register range, a constant, or a name such as "off"."""

    text: str
    kind: str  # "v" vector, "s" scalar, "constant", "name"
    index: int = 0
    count: int = 1
    value: int | float = 0
    negate: bool = False
    absolute: bool = False
    extend: bool = False

    def bits(self, kind="b32"):
        """The pattern that a constant stands for, as an operand of that kind."""
        if self.kind != "constant":
            raise EmulationError(f"{self.text} is no constant")
        if isinstance(self.value, int):
            return self.value & (0xFFFFFFFFFFFFFFFF if kind == "b64" else 0xFFFFFFFF)
        if kind == "b64":
            raise EmulationError(f"a float constant of 64 bits: {self.text}")
        form, integer = ("<e", "<H") if kind == "f16" else ("<f", "<I")
        return struct.unpack(integer, struct.pack(form, self.value))[0]


def parse_operand(text):
    inner = text
    extend = inner.startswith("sext(")
    if extend:
        inner = inner[5:-1]
    negate = bool(re.match(r"-[^\d.]|neg\(", inner))
    if negate:
        inner = inner[4:-1] if inner.startswith("neg(") else inner[1:]
    absolute = inner.startswith("|")
    inner = inner.strip("|")
    changes = {"negate": negate, "absolute": absolute, "extend": extend}
    if found := re.fullmatch(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])", inner):
        file, one, first, last = found.groups()
        index = int(one or first)
        count = 1 if one else int(last) - index + 1
        if file == "a":
            index += AGPRS
        return Operand(text, "s" if file == "s" else "v", index, count, **changes)
    if inner in NAMED:
        index, count = NAMED[inner]
        return Operand(text, "s", index, count, **changes)
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", inner):
        return Operand(text, "constant", value=int(inner, 0), **changes)
    if re.fullmatch(r"-?\d+\.\d*(e[-+]?\d+)?", inner):
        return Operand(text, "constant", value=float(inner), **changes)
    return Operand(text, "name", **changes)


@dataclass(frozen=True)
class Instruction:
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, Any]

    @property
    def kind(self):
        """Its class, as the counters count it."""
        for name, pattern in CLASSES:
            if re.match(pattern, self.text):
                return name
        raise self.unknown()

    @property
    def touches_memory(self):
        return self.kind in ("async", "load", "store")

    def unknown(self, what="instruction"):
        """The error that says what is not modelled."""
        return EmulationError(f"unknown {what}: {self.text}")

    def allow(self, *names):
        """Raise where the instruction has another modifier than these."""
        if set(self.modifiers) - set(names):
            raise self.unknown("modifier")


def _parts(text):
    """Split at the commas that stand outside all brackets."""
    depth, start = 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()


def _modifier(text):
    name, _, value = text.partition(":")
    if value.startswith("["):
        return name, [int(part, 0) for part in value[1:-1].split(",")]
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", value):
        return name, int(value, 0)
    return name, value or True


def parse_instruction(text):
    opcode, _, rest = text.partition(" ")
    if opcode == "s_waitcnt":
        counts = re.findall(r"(\w+)\((\d+)\)", rest)
        if not counts or re.sub(r"\w+\(\d+\)|[\s&]", "", rest):
            raise EmulationError(f"unknown wait: {text}")
        return Instruction(text, opcode, (), {name: int(count) for name, count in counts})
    parts, modifiers = list(_parts(rest)), {}
    if parts:  # modifiers follow the last operand, separated by spaces
        last, *after = re.findall(r"[^\s\[(]+(?:[\[(][^\])]*[\])])?\S*", parts[-1])
        parts[-1] = last
        modifiers = dict(map(_modifier, after))
    return Instruction(text, opcode, tuple(map(parse_operand, parts)), modifiers)


@dataclass(frozen=True)
class Argument:
    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Program:
    """One kernel."""

    arch: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    directives: dict[str, int]  # what `.amdhsa_<name>` says
    arguments: tuple[Argument, ...]
    vector_spills: int  # registers, to memory
    scalar_spills: int  # registers, to lanes of vector registers

    def replaced(self, position, text):
        """The same program with another instruction at that place."""
        instructions = list(self.instructions)
        instructions[position] = parse_instruction(text)
        return dataclasses.replace(self, instructions=tuple(instructions))

    def find(self, pattern):
        """Positions of the instructions whose text matches."""
        return [i for i, each in enumerate(self.instructions) if re.match(pattern, each.text)]


def _body(text):
    """The lines of the first function, without comments."""
    inside = False
    for line in text.splitlines():
        if not inside:
            inside = bool(re.match(r"[\w$.]+:\s*; @", line))
        elif line.startswith(".Lfunc_end"):
            return
        else:
            yield line.split(";")[0].split("//")[0].strip()


def _spilled(kind, metadata):
    return int(re.search(rf"\.{kind}_spill_count:\s+(\d+)", metadata)[1])


def parse_program(text):
    instructions, labels = [], {}
    for line in _body(text):
        if re.fullmatch(r"[.\w$]+:", line):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith("."):
            instructions.append(parse_instruction(line))
    metadata = text[text.find(".amdgpu_metadata") :]
    blocks = metadata[metadata.find(".args:") : metadata.find(".group_segment_fixed_size")]
    fields = [dict(re.findall(r"\.(\w+):\s+(\S+)", block)) for block in re.split(r"\n\s+- ", blocks)[1:]]
    return Program(
        arch=re.search(r"\.amdgcn_target .*(gfx\w+)", text)[1],
        instructions=tuple(instructions),
        labels=labels,
        directives={name: int(value) for name, value in re.findall(r"\.amdhsa_(\w+) (\d+)", text)},
        arguments=tuple(Argument(int(f["offset"]), int(f["size"]), f["value_kind"]) for f in fields),
        vector_spills=_spilled("vgpr", metadata),
        scalar_spills=_spilled("sgpr", metadata),
    )
