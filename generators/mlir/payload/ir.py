"""Writing MLIR by hand is mostly repeating types. This says them once: a Value is an SSA name and its type, and the
functions below print one operation each."""
import re
from typing import NamedTuple


class Value(NamedTuple):
    name: str
    type: str


def tensor(*shape, element="f32"):
    """tensor(24, "?") is the type tensor<24x?xf32>."""
    return "tensor<" + "".join(f"{n}x" for n in shape) + element + ">"


def memref(*shape, element="f32", strides=None):
    layout = f", strided<[{', '.join(map(str, strides))}], offset: ?>" if strides else ""
    return "memref<" + "".join(f"{n}x" for n in shape) + element + layout + ">"


def parts(type):
    """Shape and element of a type: parts("memref<4x?xf32, ...>") is (["4", "?"], "f32")."""
    shape, element = re.match(r"\w+<((?:(?:\d+|\?)x)*)(\w+)", type).groups()
    return shape.split("x")[:-1], element


def args(values):
    return f"{', '.join(v.name for v in values)} : {', '.join(v.type for v in values)}"


def affine(dims, *results):
    """affine("pij", "ij", "p") are the maps (p,i,j) -> (i,j) and (p,i,j) -> (p)."""
    return ", ".join(f"affine_map<({','.join(dims)}) -> ({','.join(r)})>" for r in results)


class Function:
    """The text of a function's body, line by line."""

    def __init__(self):
        self.lines, self.depth = [], 1

    def __call__(self, text):
        """Adds lines as they are (an operation that needs no help)."""
        for line in text.strip("\n").splitlines():
            line = line.strip()
            self.depth -= line.startswith("}")
            self.lines.append("  " * self.depth + line)
            self.depth += line.endswith("{")

    def text(self):
        return "\n".join(self.lines) + "\n"

    def index(self, name, expression):
        """%name = expression on index values: index("rest", "subi %n, %i"), several results of one kind."""
        self(f"{name} = arith.{expression} : index")

    def constant(self, name, value, type="index"):
        self(f"{name} = arith.constant {value} : {type}")

    def buffer(self, name, *shape, element="f32"):
        """A tensor of its own memory. (tensor.empty would let CSE merge equal ones, and copies appear.)"""
        value = Value(name, tensor(*shape, element=element))
        self(f"{name} = bufferization.alloc_tensor() : {value.type}")
        return value

    def fill(self, name, value, out, tag=None):
        attribute = f' {{tag = "{tag}"}}' if tag else ""
        self(f"{name} = linalg.fill{attribute} ins({value} : f32) outs({out.name} : {out.type}) -> {out.type}")
        return Value(name, out.type)

    def generic(self, names, dims, maps, kinds, ins, outs, body, tag=None):
        """linalg.generic: names of the results, "pij", maps of all operands, kinds as in "prp" (parallel, reduction),
        the body as a text that starts with the block's arguments."""
        attribute = f'tag = "{tag}", ' if tag else ""
        iterators = ", ".join('"parallel"' if k == "p" else '"reduction"' for k in kinds)
        types = ", ".join(o.type for o in outs)
        self(f"{', '.join(names)} = linalg.generic {{{attribute}indexing_maps = [{affine(dims, *maps)}], "
             f"iterator_types = [{iterators}]}} " + (f"ins({args(ins)}) " if ins else "") + f"outs({args(outs)}) {{")
        self(body)
        self(f"}} -> ({types})" if len(outs) > 1 else f"}} -> {types}")
        return [Value(n, o.type) for n, o in zip(names, outs)]

    def slice(self, name, source, offsets, sizes, *shape):
        """extract_slice with unit strides; `shape` is the result's (dimensions of extent 1 may be dropped)."""
        value = Value(name, tensor(*shape, element=parts(source.type)[1]))
        ones = ", ".join("1" for _ in offsets)
        self(f"{name} = tensor.extract_slice {source.name}[{', '.join(map(str, offsets))}] [{', '.join(map(str, sizes))}] "
             f"[{ones}] : {source.type} to {value.type}")
        return value

    def insert(self, name, part, into, offsets, sizes):
        ones = ", ".join("1" for _ in offsets)
        self(f"{name} = tensor.insert_slice {part.name} into {into.name}[{', '.join(map(str, offsets))}] "
             f"[{', '.join(map(str, sizes))}] [{ones}] : {part.type} into {into.type}")
        return Value(name, into.type)

    def read(self, name, buffer, *shape, writable=False):
        """The tensor that lies in a memref argument."""
        value = Value(name, tensor(*shape, element=parts(buffer.type)[1]))
        self(f"{name} = bufferization.to_tensor {buffer.name} restrict{' writable' * writable} : {buffer.type} to {value.type}")
        return value

    def store(self, value, buffer):
        self(f"bufferization.materialize_in_destination {value.name} in restrict writable {buffer.name} : "
             f"({value.type}, {buffer.type}) -> ()")
