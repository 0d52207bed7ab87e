"""Writing MLIR for a GPU: values with operators, and the operations that the kernels need, each printed by one call.

A Value is an SSA name and its type; `row * 2 + 1` prints arith.muli and arith.addi and makes the constants it needs.
"""

GLOBAL, SHARED = "#gpu.address_space<global>", "#gpu.address_space<workgroup>"
HALF2, FLOAT2 = "vector<2xf16>", "vector<2xf32>"


class Value:
    def __init__(self, kernel, name, type):
        self.kernel, self.name, self.type = kernel, name, type

    def __str__(self):
        return self.name

    def is_float(self):
        return "f32" in self.type

    def binary(self, other, integer, real, swap=False):
        other = self.kernel.constant(other, self.type) if not isinstance(other, Value) else other
        a, b = (other, self) if swap else (self, other)
        return self.kernel.op(f"arith.{real if self.is_float() else integer} {a}, {b} : {self.type}", self.type)

    def __add__(self, other):
        return self if isinstance(other, int) and other == 0 else self.binary(other, "addi", "addf")

    def __sub__(self, other):
        return self.binary(other, "subi", "subf")

    def __rsub__(self, other):
        return self.binary(other, "subi", "subf", swap=True)

    def __mul__(self, other):
        return self if isinstance(other, int) and other == 1 else self.binary(other, "muli", "mulf")

    def __floordiv__(self, other):  # of what is not negative
        return self.binary(other, "divui", None)

    def __mod__(self, other):
        return self.binary(other, "remui", None)

    def __and__(self, other):
        return self.binary(other, "andi", None)

    def __or__(self, other):
        return self.binary(other, "ori", None)

    def __xor__(self, other):
        return self.binary(other, "xori", None)

    def __lshift__(self, other):
        return self.binary(other, "shli", None)

    def __rshift__(self, other):  # of what is not negative
        return self.binary(other, "shrui", None)

    def __neg__(self):
        return self.kernel.op(f"arith.negf {self} : {self.type}", self.type)

    def min(self, other):
        return self.binary(other, "minsi", "minnumf")

    def max(self, other):
        return self.binary(other, "maxsi", "maxnumf")

    def compare(self, integer, real, other):
        other = self.kernel.constant(other, self.type) if not isinstance(other, Value) else other
        text = f"arith.cmpf {real}" if self.is_float() else f"arith.cmpi {integer}"
        return self.kernel.op(f"{text}, {self}, {other} : {self.type}", "i1")

    def __lt__(self, other):
        return self.compare("slt", "olt", other)

    def __le__(self, other):
        return self.compare("sle", "ole", other)

    def __gt__(self, other):
        return self.compare("sgt", "ogt", other)

    def __ge__(self, other):
        return self.compare("sge", "oge", other)

    def equals(self, other):
        return self.compare("eq", "oeq", other)

    def differs(self, other):
        """For floats also where one of them is NaN."""
        return self.compare("ne", "une", other)

    def index(self):
        return self if self.type == "index" else self.kernel.op(f"arith.index_cast {self} : {self.type} to index", "index")

    def i32(self):
        return self if self.type == "i32" else self.kernel.op(f"arith.index_cast {self} : {self.type} to i32", "i32")

    def select(self, yes, no):
        """self ? yes : no"""
        first = yes if isinstance(yes, Value) else no
        yes, no = (x if isinstance(x, Value) else self.kernel.constant(x, first.type) for x in (yes, no))
        return self.kernel.op(f"arith.select {self}, {yes}, {no} : {yes.type}", yes.type)


class Kernel:
    """A gpu.func: its text, with all constants in front."""

    def __init__(self, name, arguments, threads, shared=(), few_blocks=False):
        """arguments, shared: [(name, type)]; shared ones are workgroup memory. few_blocks: ptxas need not save registers
        for the sake of many blocks on an SM (it spills otherwise)."""
        self.name, self.threads, self.few_blocks = name, threads, few_blocks
        self.arguments, self.shared = arguments, shared
        self.lines, self.depth, self.count, self.constants = [], 2, 0, {}
        for argument, type in list(arguments) + list(shared):
            setattr(self, argument, Value(self, f"%{argument}", type))

    def line(self, text):
        self.lines.append("  " * self.depth + text)

    def fresh(self, prefix="%"):
        self.count += 1
        return f"{prefix}{self.count}"

    def op(self, text, type):
        name = self.fresh()
        self.line(f"{name} = {text}")
        return Value(self, name, type)

    def constant(self, value, type):
        key = (str(value), type)
        if key not in self.constants:
            self.constants[key] = f"%c{len(self.constants)}"
        return Value(self, self.constants[key], type)

    def text(self):
        arguments = ", ".join(f"%{name}: {type}" for name, type in self.arguments)
        shared = ", ".join(f"%{name}: {type} {{llvm.align = 16 : i64}}" for name, type in self.shared)
        head = f"  gpu.func @{self.name}({arguments}){f' workgroup({shared})' if shared else ''} kernel " \
               f"attributes {{known_block_size = array<i32: {self.threads}, 1, 1>{', nvvm.minctasm = 1 : i32' * self.few_blocks}}} {{"
        constants = [f"    {name} = arith.constant {literal(value, type)} : {type}" for (value, type), name in self.constants.items()]
        return "\n".join([head] + constants + self.lines + ["    gpu.return", "  }"])

    # --- control

    def if_(self, condition, then, otherwise=None, types=()):
        """then() and otherwise() give lists of values of `types`."""
        names = [self.fresh("%i") for _ in types]
        results = f"{', '.join(names)} = " if types else ""
        self.line(f"{results}scf.if {condition}{f' -> ({join(types)})' if types else ''} {{")
        self.region(then, types)
        if otherwise or types:
            self.line("} else {")
            self.region(otherwise or (lambda: []), types)
        self.line("}")
        return [Value(self, n, t) for n, t in zip(names, types)]

    def for_(self, begin, end, step, body, initial=()):
        """body(counter, *carried) gives the next carried values."""
        types = [v.type for v in initial]
        names, carried = [self.fresh("%f") for _ in initial], [Value(self, self.fresh("%a"), t) for t in types]
        counter = Value(self, self.fresh("%k"), begin.type)
        step = step if isinstance(step, Value) else self.constant(step, begin.type)
        state = f" iter_args({join(f'{c} = {v}' for c, v in zip(carried, initial))}) -> ({join(types)})" if initial else ""
        self.line(f"{f'{join(names)} = ' if names else ''}scf.for {counter} = {begin} to {end} step {step}{state} : {begin.type} {{")
        self.region(lambda: body(counter, *carried), types)
        self.line("}")
        return [Value(self, n, t) for n, t in zip(names, types)]

    def region(self, body, types):
        self.depth += 1
        values = body()
        if types:
            self.line(f"scf.yield {join(values)} : {join(types)}")
        self.depth -= 1

    def barrier(self):
        self.line("gpu.barrier")

    # --- numbers

    def thread(self):
        return self.op("gpu.thread_id x", "index").i32()

    def block(self, axis):
        return self.op(f"gpu.block_id {axis}", "index").i32()

    def blocks(self, axis):
        return self.op(f"gpu.grid_dim {axis}", "index").i32()

    def exp2(self, x):
        # math.exp2 would become a call of libdevice.
        return self.op(f'llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f"({x}) : (f32) -> f32', "f32")

    def log2(self, x):
        return self.op(f'llvm.call_intrinsic "llvm.nvvm.lg2.approx.ftz.f"({x}) : (f32) -> f32', "f32")

    def reciprocal(self, x):
        return self.op(f"arith.divf {self.constant(1.0, 'f32')}, {x} fastmath<afn> : f32", "f32")

    def fma(self, a, b, c):
        return self.op(f"math.fma {a}, {b}, {c} : f32", "f32")

    def shuffle(self, mode, value, by):
        by = by if isinstance(by, Value) else self.constant(by, "i32")
        name = self.fresh()
        self.line(f"{name}, {name}p = gpu.shuffle {mode} {value}, {by}, {self.constant(32, 'i32')} : {value.type}".replace(f"{name}p", f"%p{name[1:]}", 1))
        return Value(self, name, value.type)

    def any_of_warp(self, predicate):
        return self.op(f"nvvm.vote.sync any {self.constant(-1, 'i32')}, {predicate} -> i1", "i1")

    def largest(self, values):
        while len(values) > 1:
            values = [a.max(b) for a, b in zip(values[::2], values[1::2])] + values[len(values) // 2 * 2:]
        return values[0]

    # --- vectors

    def pair(self, a, b, type=FLOAT2):
        return self.op(f"vector.from_elements {a}, {b} : {type}", type)

    def part(self, vector, i, type):
        return self.op(f"vector.extract {vector}[{i}] : {type} from {vector.type}", type)

    def bitcast(self, value, type):
        return value if value.type == type else self.op(f"llvm.bitcast {value} : {value.type} to {type}", type)

    # --- memory

    def address(self, pointer):
        return self.op(f"memref.extract_aligned_pointer_as_index {pointer} : {pointer.type} -> index", "index")

    def view(self, pointer, offset, sizes, strides, element):
        """Strided memory from a bare pointer. sizes, strides: numbers or index values."""
        def static(x):
            return "?" if isinstance(x, Value) else str(x)
        shape = "x".join(static(x) for x in sizes)
        type = f"memref<{shape}x{element}, strided<[{join(static(s) for s in strides)}], offset: ?>, {GLOBAL}>"
        return self.op(f"memref.reinterpret_cast {pointer} to offset: [{offset}], sizes: [{join(sizes)}], strides: [{join(strides)}] "
                       f": {pointer.type} to {type}", type)

    def at(self, indices):
        return join(i.index() if isinstance(i, Value) else self.constant(i, "index") for i in indices)

    def load(self, memory, indices, type):
        if not type.startswith("vector"):
            return self.op(f"memref.load {memory}[{self.at(indices)}] : {memory.type}", type)
        return self.op(f"vector.load {memory}[{self.at(indices)}] {{alignment = {bytes_of(type)} : i64}} : {memory.type}, {type}", type)

    def store(self, value, memory, indices):
        if not value.type.startswith("vector"):
            self.line(f"memref.store {value}, {memory}[{self.at(indices)}] : {memory.type}")
        else:
            self.line(f"vector.store {value}, {memory}[{self.at(indices)}] {{alignment = {bytes_of(value.type)} : i64}} : {memory.type}, {value.type}")


def join(values):
    return ", ".join(str(v) for v in values)


def literal(value, type):
    if type != "f32":
        return value
    return "0xFF800000" if value == "-inf" else f"{float(value):.9e}"


def bytes_of(vector):
    count, element = vector[len("vector<"):-1].split("x")
    return int(count) * int(element.lstrip("bfi")) // 8
