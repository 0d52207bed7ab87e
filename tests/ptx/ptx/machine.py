"""Runs an entry: all threads of some thread blocks at once, in vectors.

Threads that stand at the same instruction go together, the ones furthest behind first, so that they meet again after a
branch. In what order the warps really run is not known, so nothing may depend on it: that is what the checks of shared
and global memory see to. With `order`, a random generator, the warps of a block run one after the other in random order
from barrier to barrier instead.
"""
import numpy as np

from .decode import decode
from .errors import PtxError
from .memory import LocalMemory, SharedMemory

LONGEST = 50_000_000  # steps; a loop without end


class Machine:
    def __init__(self, entry, memory, parameters, grid, block, indices, dynamic, first_id, late=True, order=None):
        """indices: [blocks, 3], the places of these blocks in the grid."""
        self.entry, self.memory, self.parameters, self.late, self.order = entry, memory, parameters, late, order
        if not hasattr(entry, "steps"):
            entry.steps = decode(entry)
            entry.granule = granule(entry)
            entry.warp_wide = {i for i, instruction in enumerate(entry.code) if instruction.opcode in ("shfl", "vote", "ldmatrix", "mma")}
        self.grid, self.block_size = grid, block
        threads = block[0] * block[1] * block[2]
        padded = -(-threads // 32) * 32
        blocks = len(indices)
        self.lanes = np.arange(blocks * padded)
        self.block, self.thread = self.lanes // padded, self.lanes % padded
        self.ids = first_id + self.block * threads + self.thread
        self.indices = np.asarray(indices)
        self.registers = {}
        self.alive = self.thread < threads
        self.waiting = np.zeros(self.lanes.size, bool)  # at a barrier of the block
        self.parked = np.zeros(self.lanes.size, bool)   # at an instruction of the whole warp, for the rest of it
        self.pc = np.zeros(self.lanes.size, np.int64)
        self.mask, self.active = None, self.lanes
        self.shared = SharedMemory(blocks, self.dynamic_offset() + dynamic, entry.granule, self.block, self.thread)
        self.local = LocalMemory(self.lanes.size, entry.local_bytes)
        self.groups, self.copies = np.zeros(self.lanes.size, np.int64), []
        self.statistics, self.operands, self.specials = {}, {}, {}

    def dynamic_offset(self):
        return -(-self.entry.shared_bytes // 16) * 16 if self.entry.shared_bytes else 0

    # --- values

    def special(self, name):
        if name not in self.specials:
            kind, _, axis = name[1:].partition(".")
            i = "xyz".find(axis) if axis else 0
            x, y, _ = self.block_size
            tid = (self.thread % x, self.thread // x % y, self.thread // (x * y))
            value = {"tid": lambda: tid[i], "ntid": lambda: self.block_size[i], "ctaid": lambda: self.indices[self.block, i],
                     "nctaid": lambda: self.grid[i], "laneid": lambda: self.thread % 32, "warpid": lambda: self.thread // 32}[kind]()
            self.specials[name] = np.broadcast_to(np.asarray(value, np.int64), self.lanes.size).copy()
        return self.specials[name]

    def set(self, name, value):
        """value: one element for each lane, of those that are not active any."""
        if self.mask is not None:
            old = self.registers.get(name)
            if old is not None:
                value = np.where(self.mask, value, old.view(value.dtype))
        self.registers[name] = value

    def set_active(self, name, value):
        """value: one element for each active lane."""
        if self.mask is None:
            self.registers[name] = value
            return
        old = self.registers.get(name)
        new = np.full(self.lanes.size, 0xFF, np.uint8).repeat(value.itemsize).view(value.dtype) if old is None else old.view(value.dtype).copy()
        new[self.active] = value
        self.registers[name] = new

    def set_warps(self, name, value):
        """value: [active warps, 32]."""
        self.set_active(name, value.reshape(-1))

    def active_lanes(self):
        return self.active

    def at_active(self, values):
        return values if self.mask is None else values[self.mask]

    def count(self, name, by):
        self.statistics[name] = self.statistics.get(name, 0) + by

    # --- cp.async: a copy belongs to the group that its thread commits next, and is complete when its thread waits for it

    def issue_copy(self, lanes, targets, size, data):
        self.shared.before_write(targets, size, lanes, flying=True)
        where = (self.shared.start[lanes] + targets)[:, None] + np.arange(size)
        self.shared.data[where] = 0xFF if self.late else data
        self.copies.append((lanes, targets, size, data, self.groups[lanes]))

    def commit_copies(self):
        self.groups[self.active] += 1

    def wait_for_copies(self, keep):
        waits = np.zeros(self.lanes.size, bool)
        waits[self.active] = True
        remaining = []
        for lanes, targets, size, data, group in self.copies:
            done = waits[lanes] & (group < self.groups[lanes] - keep)
            if done.any():
                self.shared.before_write(targets[done], size, lanes[done], landing=True)
                where = (self.shared.start[lanes[done]] + targets[done])[:, None] + np.arange(size)
                self.shared.data[where] = data[done]
            if not done.all():
                left = ~done
                remaining.append((lanes[left], targets[left], size, data[left], group[left]))
        self.copies = remaining

    # --- execution

    def where(self, pc):
        instruction = self.entry.code[pc]
        return f"{self.entry.name}, line {instruction.line}: {instruction.text}"

    def runnable(self):
        ready = self.alive & ~self.waiting & ~self.parked
        if self.order is None or not ready.any():
            return ready
        # One warp of each block, chosen at random, until it waits or ends.
        if not (ready & self.chosen()).any():
            self.pick(ready)
        return ready & self.chosen()

    def chosen(self):
        if not hasattr(self, "turn"):
            self.turn = np.full(self.shared.epoch.size, -1)
        return self.thread // 32 == self.turn[self.block]

    def pick(self, ready):
        for b in range(self.turn.size):
            warps = np.unique(self.thread[ready & (self.block == b)] // 32)
            self.turn[b] = self.order.choice(warps) if warps.size else -1

    def run(self):
        with np.errstate(all="ignore"):
            steps = 0
            while self.alive.any():
                ready = self.runnable()
                if not ready.any() and self.parked.any():
                    raise PtxError("lanes", "part of a warp executes an instruction of the whole warp").at(self.where(int(self.pc[self.parked].min())))
                if not ready.any():
                    raise PtxError("barrier", "threads wait at a barrier that others of their block do not reach").at(self.where(int(self.pc[self.waiting].min())))
                steps += self.run_group(ready)
                if steps > LONGEST:
                    raise PtxError("stuck", f"more than {LONGEST} steps")
            if self.copies:
                self.count("copies never waited for", len(self.copies))

    def run_group(self, ready):
        """The threads furthest behind, up to the next branch or barrier, or to where others wait. Returns the steps."""
        pcs = self.pc[ready]
        pc = int(pcs.min())
        group = ready & (self.pc == pc)
        others = pcs[pcs > pc]
        stop = int(others.min()) if others.size else -1
        whole = bool(group.all())
        self.mask, self.active = (None, self.lanes) if whole else (group, self.lanes[group])
        code, first = self.entry.steps, pc
        while True:
            if pc >= len(code):
                raise PtxError("stuck", "the code ends without ret").at(self.where(pc - 1))
            step = code[pc]
            instruction = self.entry.code[pc]
            try:
                if type(step) is tuple:
                    self.control(step, instruction, group, pc)
                    return pc - first + 1
                if not whole and pc in self.entry.warp_wide:
                    group = self.gather(group, pc)
                    if not group.any():
                        return pc - first + 1
                    whole = bool(group.all())
                    self.mask, self.active = (None, self.lanes) if whole else (group, self.lanes[group])
                if instruction.guard is None:
                    step(self)
                else:
                    self.guarded(step, instruction, group, whole)
            except PtxError as error:
                raise error.at(self.where(pc)) from None
            except KeyError as error:
                if error.args and str(error.args[0]).startswith("%"):
                    raise PtxError("uninitialised", f"register {error.args[0]} is read before it is written").at(self.where(pc)) from None
                raise
            pc += 1
            if pc == stop:
                self.pc[group] = pc
                return pc - first

    def gather(self, group, pc):
        """The whole warps among the threads at an instruction for whole warps; the others wait there for the rest."""
        here = group | (self.parked & (self.pc == pc))
        complete = np.repeat(here.reshape(-1, 32).all(1), 32)
        self.parked[here] = ~complete[here]
        self.pc[here] = pc
        return here & complete

    def taken(self, instruction, group):
        predicate = self.registers[instruction.guard]
        return group & (~predicate if instruction.negated else predicate)

    def guarded(self, step, instruction, group, whole):
        on = self.taken(instruction, group)
        if on.any():
            if not (whole and on.all()):
                self.mask, self.active = on, self.lanes[on]
            step(self)
        self.mask, self.active = (None, self.lanes) if whole else (group, self.lanes[group])

    def control(self, step, instruction, group, pc):
        on = group if instruction.guard is None else self.taken(instruction, group)
        self.pc[group] = pc + 1
        if step[0] == "bra":
            self.pc[on] = step[1]
        elif step[0] == "exit":
            self.alive[on] = False
        else:
            self.barrier(instruction, on, pc)

    def barrier(self, instruction, on, pc):
        if not on.any():
            return
        warps = (on | ~(self.thread < self.block_size[0] * self.block_size[1] * self.block_size[2])).reshape(-1, 32)
        if (on.reshape(-1, 32).any(1) & ~warps.all(1)).any():
            raise PtxError("barrier", "a barrier with part of a warp")
        if ((self.pc != pc + 1) & self.waiting & self.of_blocks(on)).any():
            raise PtxError("barrier", "threads of one block wait at different barriers")
        self.waiting[on] = True
        threads = self.block_size[0] * self.block_size[1] * self.block_size[2]
        blocks = self.shared.epoch.size
        arrived = np.bincount(self.block[self.waiting], minlength=blocks)
        passed = arrived == threads
        if passed.any():
            self.count("barriers", 1)
            self.shared.new_epoch(passed)
            self.waiting &= ~passed[self.block]

    def of_blocks(self, lanes):
        some = np.zeros(self.shared.epoch.size, bool)
        some[self.block[lanes]] = True
        return some[self.block]


def granule(entry):
    """The smallest access of shared memory; every access is a whole number of them, aligned to its own size."""
    smallest = 16
    for i in entry.code:
        if i.opcode in ("ld", "st") and not {"global", "local", "param"} & set(i.modifiers):
            bits = int("".join(c for c in i.modifiers[-1] if c.isdigit()))
            count = next((int(m[1:]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)
            smallest = min(smallest, bits // 8 * count)
        elif i.opcode == "cp" and i.operands and not {"wait_group", "wait_all"} & set(i.modifiers):
            smallest = min(smallest, i.operands[2].bits)
    return smallest

