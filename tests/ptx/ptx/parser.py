"""PTX text to instructions. Covers what LLVM writes for compute kernels; anything else is an error with its line."""
import re
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from .errors import PtxError

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


class Register(NamedTuple):
    name: str


class Special(NamedTuple):
    name: str  # %tid.x …


class Symbol(NamedTuple):
    name: str


class Immediate(NamedTuple):
    bits: int  # two's complement, of the instruction's width
    is_float: bool = False


class Vector(NamedTuple):
    parts: tuple


class Address(NamedTuple):
    base: object
    offset: int


@dataclass
class Instruction:
    opcode: str
    modifiers: tuple
    operands: tuple
    guard: str | None
    negated: bool
    text: str
    line: int


@dataclass
class Parameter:
    name: str
    bytes: int
    align: int


@dataclass
class Entry:
    name: str
    parameters: list
    registers: dict = field(default_factory=dict)  # %r12 -> b32
    shared: dict = field(default_factory=dict)     # variable -> offset
    shared_bytes: int = 0
    dynamic: str | None = None                     # the variable of dynamic shared memory
    local: dict = field(default_factory=dict)
    local_bytes: int = 0
    code: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)
    threads: tuple | None = None                   # .reqntid or .maxntid
    exact_threads: bool = False


@dataclass
class Module:
    target: str
    version: str
    entries: dict


def parse(text):
    """The module of a PTX text."""
    lines = Lines(text)
    module = Module("", "", {})
    shared = {"variables": {}, "bytes": 0, "dynamic": None}
    position = 0
    while True:
        position = lines.skip_space(position)
        if position >= len(lines.text):
            return module
        rest = lines.text[position:]
        if match := re.match(r"\.version\s+([\d.]+)", rest):
            module.version = match[1]
        elif match := re.match(r"\.target\s+(sm_\w+)[^\n]*", rest):
            module.target = match[1]
        elif match := re.match(r"\.address_size\s+64", rest):
            pass
        elif match := re.match(r"\.extern\s+\.func\s[^;]*;", rest):
            pass  # a declaration (vprintf): its call would be refused
        elif match := re.match(r"(?:\.(?:extern|visible|weak)\s+)?\.shared\s[^;]*;", rest):
            declare(shared, match[0], lines.number(position))
        elif match := re.match(r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", rest):
            end = lines.text.index("\n}", position)  # LLVM ends functions at the first column
            entry = Entry(match[1], parameters(match[2], lines.number(position)))
            read_directives(entry, match[3])
            body(entry, lines, position + match.end(), end, shared)
            module.entries[entry.name] = entry
            position = end + 2
            continue
        else:
            raise PtxError("parse", f"line {lines.number(position)}: '{rest.splitlines()[0][:80]}'")
        position += match.end()


class Lines:
    def __init__(self, text):
        # Comments become blanks, so that positions keep their line.
        self.text = re.sub(r"//[^\n]*", "", text)
        self.starts = [0] + [m.end() for m in re.finditer("\n", self.text)]

    def number(self, position):
        low, high = 0, len(self.starts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.starts[middle] <= position else (low, middle)
        return low + 1

    def skip_space(self, position):
        return re.compile(r"\s*").match(self.text, position).end()


def parameters(text, line):
    result = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([busf])(\d+)\s+(?:\.ptr\s*(?:\.\w+\s*)?(?:\.align\s+\d+\s*)?)?([\w$]+)(?:\[(\d+)\])?", part)
        if not match:
            raise PtxError("parse", f"line {line}: parameter '{part}'")
        size = SIZES[match[3]] * int(match[5] or 1)
        result.append(Parameter(match[4], size, int(match[1] or SIZES[match[3]])))
    return result


def read_directives(entry, text):
    for word, numbers in re.findall(r"\.(\w+)\s*([\d,\s]*)", text):
        if word in ("reqntid", "maxntid"):
            values = [int(n) for n in numbers.replace(",", " ").split()]
            entry.threads, entry.exact_threads = tuple(values + [1] * (3 - len(values))), word == "reqntid"
        elif word not in ("minnctapersm", "maxnreg", "maxnctapersm"):
            raise PtxError("parse", f"entry {entry.name}: directive .{word}")


def declare(shared, text, line):
    match = re.fullmatch(r"(?:\.\w+\s+)?\.(?:shared|local)\s+\.align\s+(\d+)\s+\.[bfsu](\d+)\s+([\w$]+)(?:\[(\d*)\])?;", text.strip())
    if not match:
        raise PtxError("parse", f"line {line}: '{text}'")
    align, width, name, count = int(match[1]), SIZES[match[2]], match[3], match[4]
    offset = -(-shared["bytes"] // align) * align
    shared["variables"][name] = offset
    if count == "":
        shared["dynamic"] = name
    else:
        shared["bytes"] = offset + width * int(count or 1)


def body(entry, lines, begin, end, module_shared):
    shared = {"variables": dict(module_shared["variables"]), "bytes": module_shared["bytes"], "dynamic": module_shared["dynamic"]}
    local = {"variables": {}, "bytes": 0, "dynamic": None}
    for match in re.compile(r"[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;").finditer(lines.text, begin, end):
        text, start = match[0], match.start()
        while label := re.match(r"\s*([\w$]+):", text):
            entry.labels[label[1]] = len(entry.code)
            text, start = text[label.end():], start + label.end()
        line = lines.number(lines.skip_space(start))
        text = " ".join(text.split())
        if registers := re.fullmatch(r"\.reg \.(\w+) (%[A-Za-z_]+)<(\d+)>;", text):
            entry.registers.update({f"{registers[2]}{i}": registers[1] for i in range(int(registers[3]))})
        elif registers := re.fullmatch(r"\.reg \.(\w+) (%\w+);", text):
            entry.registers[registers[2]] = registers[1]
        elif text.startswith(".shared"):
            declare(shared, text, line)
        elif text.startswith(".local"):
            declare(local, text, line)
        elif re.match(r"\.(pragma|loc|file)\b", text):
            pass
        elif text.startswith("."):
            raise PtxError("parse", f"line {line}: '{text}'")
        else:
            entry.code.append(instruction(text[:-1].strip(), line))
    rest = re.compile(r"[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;").sub("", lines.text[begin:end]).strip()
    if rest:
        raise PtxError("parse", f"entry {entry.name}: '{rest[:80]}'")
    entry.shared, entry.shared_bytes, entry.dynamic = shared["variables"], shared["bytes"], shared["dynamic"]
    entry.local, entry.local_bytes = local["variables"], local["bytes"]


def instruction(text, line):
    match = re.match(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)$", text)
    if not match:
        raise PtxError("parse", f"line {line}: '{text}'")
    name, *modifiers = match[3].replace("::", ":").split(".")
    operands = [operand(t.strip(), line) for t in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,|]*", match[4])]
    return Instruction(name, tuple(modifiers), tuple(operands), match[2], match[1] == "!", text, line)


def operand(text, line):
    if text[0] == "{":
        return Vector(tuple(operand(t.strip(), line) for t in text[1:-1].split(",")))
    if text[0] == "[":
        match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        if not match:
            raise PtxError("parse", f"line {line}: address '{text}'")
        return Address(operand(match[1], line), int(match[2] or 0))
    if re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.[xyz]|%laneid|%warpid", text):
        return Special(text)
    if text[0] == "%":
        return Register(text)
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return Immediate(int(match[1], 16), True)
    if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return Immediate(int(match[1], 16), True)
    if re.fullmatch(r"-?\d+U?|-?0[xX][0-9a-fA-F]+U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    if re.fullmatch(r"-?\d+\.\d*", text):
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], True)
    if re.fullmatch(r"[\w$]+", text):
        return Symbol(text)
    raise PtxError("parse", f"line {line}: operand '{text}'")
