"""What the instruction handlers share: types, operands, and the rule that every modifier has to be understood.

A handler takes a Reader and returns a step: a function of the machine, run each time the instruction is executed. All
work that does not depend on values (names, widths, constants) is done once, while decoding.
"""
import numpy as np

from .errors import PtxError
from .parser import Address, Immediate, Register, Special, Symbol, Vector

TYPES = {"pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64,
         **{f"{k}{8 * n}": np.dtype(f"{'i' if k == 's' else 'u'}{n}").type for k in "bus" for n in (1, 2, 4, 8)}}
PACKED = {"f16x2": "b32", "bf16x2": "b32", "bf16": "b16"}  # types that numpy lacks: handled as bits
HANDLERS = {}


def width(name):
    return np.dtype(TYPES[PACKED.get(name, name)]).itemsize


def handler(*opcodes):
    def register(function):
        for opcode in opcodes:
            HANDLERS[opcode] = function
        return function
    return register


class Reader:
    def __init__(self, instruction, entry):
        self.instruction, self.entry, self.left = instruction, entry, list(instruction.modifiers)
        self.operands = instruction.operands

    def unsupported(self, what):
        raise PtxError("unsupported", what)

    def type(self):
        """The last modifier."""
        if not self.left or (self.left[-1] not in TYPES and self.left[-1] not in PACKED):
            self.unsupported(f"type in '{self.instruction.text}'")
        return self.left.pop()

    def take(self, *names):
        """The first of these modifiers that is there, or None."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        return None

    def require(self, *names):
        found = self.take(*names)
        if found is None:
            self.unsupported(f"'{self.instruction.text}': expected one of .{', .'.join(names)}")
        return found

    def finish(self, operands=None):
        if self.left:
            self.unsupported(f"modifier .{', .'.join(self.left)} in '{self.instruction.text}'")
        if operands is not None and len(self.operands) != operands:
            self.unsupported(f"{len(self.operands)} operands in '{self.instruction.text}'")

    def source(self, operand, type):
        """A function of the machine that gives the operand's value as an array of the type."""
        dtype = TYPES[PACKED.get(type, type)]
        size = np.dtype(dtype).itemsize
        if isinstance(operand, Register):
            self.check_width(operand, type)
            name = operand.name
            if type == "pred":
                return lambda m: m.registers[name]
            return lambda m: m.registers[name].view(dtype)
        if isinstance(operand, Immediate):
            bits = operand.bits & ((1 << 8 * size) - 1)
            constant = np.array([bits], np.dtype(f"u{size}")).view(dtype)[0] if type != "pred" else np.bool_(bits)
            return lambda m: np.full(m.lanes.size, constant)
        if isinstance(operand, Special):
            name = operand.name
            return lambda m: m.special(name).astype(dtype)
        if isinstance(operand, Symbol):
            address = dtype(self.symbol(operand.name))
            return lambda m: np.full(m.lanes.size, address)
        self.unsupported(f"operand {operand} in '{self.instruction.text}'")

    def symbol(self, name):
        if name == self.entry.dynamic:
            return -(-self.entry.shared_bytes // 16) * 16
        for variables in (self.entry.shared, self.entry.local):
            if name in variables:
                return variables[name]
        self.unsupported(f"symbol {name} in '{self.instruction.text}'")

    def register_type(self, operand):
        if operand.name not in self.entry.registers:
            raise PtxError("parse", f"register {operand.name} is not declared")
        return self.entry.registers[operand.name]

    def check_width(self, operand, type):
        have = self.register_type(operand)
        if (have == "pred") != (type == "pred") or width(have) != width(type):
            self.unsupported(f"{operand.name} is .{have}, not .{type}, in '{self.instruction.text}'")

    def target(self, operand, type):
        if not isinstance(operand, Register):
            self.unsupported(f"result {operand} in '{self.instruction.text}'")
        if operand.name != "%_":
            self.check_width(operand, type)
        return operand.name

    def extending_target(self, operand, type):
        """(name, function): a result may go to a wider register, sign or zero extended."""
        have = width(self.register_type(operand))
        if have == width(type):
            return operand.name, lambda v: v
        if have < width(type) or type not in TYPES or type[0] == "f":
            self.unsupported(f".{type} to {operand.name} in '{self.instruction.text}'")
        wide = np.dtype(f"{'i' if type[0] == 's' else 'u'}{have}")
        return operand.name, lambda v: v.astype(wide)

    def address(self, operand):
        """A function of the machine that gives int64 addresses."""
        if not isinstance(operand, Address):
            self.unsupported(f"address {operand} in '{self.instruction.text}'")
        offset = operand.offset
        if isinstance(operand.base, Register):
            name, bits = operand.base.name, width(self.register_type(operand.base))
            dtype = np.int64 if bits == 8 else np.uint32
            return lambda m: m.registers[name].view(dtype).astype(np.int64) + offset
        base = self.symbol(operand.base.name) if isinstance(operand.base, Symbol) else operand.base.bits
        return lambda m: np.full(m.lanes.size, base + offset, np.int64)

    def parts(self, operand):
        return operand.parts if isinstance(operand, Vector) else (operand,)


def decode(entry):
    """The steps of an entry's code; branches, barriers and returns are tuples for the machine."""
    from . import arithmetic, control, matrix, transfer  # noqa: F401 (they register their handlers)
    steps = []
    for instruction in entry.code:
        try:
            if instruction.opcode not in HANDLERS:
                raise PtxError("unsupported", f"instruction {instruction.opcode}")
            steps.append(HANDLERS[instruction.opcode](Reader(instruction, entry)))
        except PtxError as error:
            raise error.at(f"{entry.name}, line {instruction.line}: {instruction.text}") from None
    return steps
