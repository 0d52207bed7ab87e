"""Global, shared and local memory, each with the checks that belong to it.

Lanes: a launch runs many thread blocks at once; arrays here have one element for each thread of them all (a lane), and
accesses are vectors of addresses. A `tag` names an access of shared memory: (barrier epoch of the block) << 11 | thread.
"""
import bisect
import mmap

import numpy as np

from .errors import PtxError

I64 = np.int64
UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
MAP_NORESERVE = 0x4000  # Linux's number, which Python has no name for before 3.12
THREAD_BITS = 11  # a block has at most 1024 threads
SHARED_WINDOW, LOCAL_WINDOW = 1 << 40, 1 << 44  # where generic addresses of shared and local memory lie


def describe(lanes, addresses):
    return ", ".join(f"lane {lane} address {address:#x}" for lane, address in zip(lanes[:4], addresses[:4])) + (", …" if len(lanes) > 4 else "")


def sparse(size, dtype):
    """Zeros that take memory only where they are written: device memory may be larger than the machine's."""
    return np.frombuffer(mmap.mmap(-1, size * np.dtype(dtype).itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), dtype)


def check_alignment(addresses, size, lanes):
    wrong = addresses & (size - 1)
    if wrong.any():
        bad = wrong != 0
        raise PtxError("alignment", f"{size} bytes at {describe(lanes[bad], addresses[bad])}")


class GlobalMemory:
    """Device memory: one arena of bytes from address `base`, of which only the allocations may be touched.

    Within a launch no thread may read what another one wrote, or write it too: thread blocks have no order. Bytes that
    neither the host nor a kernel wrote may not be read.

    same_writes: for compilers that let all threads of a row write its result. Several threads may write one place then, if
    what they write is the same.
    """

    def __init__(self, arena, base, same_writes=False):
        self.arena, self.base, self.same_writes = arena, base, same_writes
        self.views = {n: arena[:arena.size // n * n].view(t) for n, t in UINTS.items()}
        self.written = sparse(arena.size, bool)    # by anybody, since it was allocated
        self.owner = None                          # of this launch: 0, or the thread that wrote the byte, from 1
        self.starts, self.ends = [], []
        self.dirty = (arena.size, 0)

    def allocate(self, address, size, written=False):
        i = bisect.bisect(self.starts, address)
        self.starts.insert(i, address)
        self.ends.insert(i, address + size)
        part = self.written[address - self.base:address - self.base + size]
        if written or part.any():
            part[:] = written

    def free(self, address):
        i = self.starts.index(address)
        del self.starts[i], self.ends[i]

    def mark_written(self, address, size):
        self.written[address - self.base:address - self.base + size] = True

    def begin_launch(self):
        if self.owner is None:
            self.owner = sparse(self.arena.size, np.int32)
        low, high = self.dirty
        self.owner[low:high] = 0
        self.dirty = (self.arena.size, 0)

    def check(self, addresses, size, lanes):
        low, high = int(addresses.min()), int(addresses.max())
        i = bisect.bisect(self.starts, low) - 1
        if i >= 0 and high + size <= self.ends[i]:
            return
        starts, ends = np.array(self.starts, I64), np.array(self.ends, I64)
        which = np.searchsorted(starts, addresses, "right") - 1
        bad = which < 0
        if starts.size:
            bad |= addresses + size > ends[which]
        if bad.any():
            raise PtxError("bounds", f"global access of {size} bytes outside the arrays: {describe(lanes[bad], addresses[bad])}")

    def load(self, addresses, size, count, lanes, constant):
        """[count] vectors of unsigned elements. constant: ld.global.nc, or nobody may write it in this launch."""
        check_alignment(addresses, size * count, lanes)
        self.check(addresses, size * count, lanes)
        offsets = addresses - self.base
        for i in (offsets, offsets + (size * count - 1)):
            if not self.written[i].all():
                bad = ~self.written[i]
                raise PtxError("uninitialised", f"read of global memory that nobody wrote: {describe(lanes[bad], addresses[bad])}")
            owner = self.owner[i]
            if owner.any():
                bad = (owner != 0) & (constant | (owner != lanes + 1))
                if bad.any():
                    raise PtxError("race", f"read of what {'this launch' if constant else 'another thread'} wrote: {describe(lanes[bad], addresses[bad])}")
        first = offsets // size
        return [self.views[size][first + k] for k in range(count)]

    def store(self, addresses, size, values, lanes):
        check_alignment(addresses, size * len(values), lanes)
        self.check(addresses, size * len(values), lanes)
        offsets = addresses - self.base
        first = offsets // size
        places = (offsets[:, None] + np.arange(size * len(values)))
        mine = np.broadcast_to((lanes + 1)[:, None], places.shape)
        before = self.owner[places]
        self.owner[places] = mine
        bad = (((before != 0) & (before != mine)) | (self.owner[places] != mine)).any(1)
        if bad.any():
            # Of each value: what lay there if another thread had put it there, and what lies there in the end.
            others = ((before != 0) & (before != mine)).any(1)
            old = [self.views[size][first + k] for k in range(len(values))]
            for k, value in enumerate(values):
                self.views[size][first + k] = value
            differs = np.zeros(lanes.size, bool)
            for k, value in enumerate(values):
                differs |= (others & (old[k] != value)) | (self.views[size][first + k] != value)
            if self.same_writes:
                bad = differs
            if bad.any():
                raise PtxError("race", f"two threads write {'different values to ' if self.same_writes else ''}the same global memory: "
                               f"{describe(lanes[bad], addresses[bad])}")
        self.written[places] = True
        for k, value in enumerate(values):
            self.views[size][first + k] = value
        self.dirty = (min(self.dirty[0], int(offsets.min())), max(self.dirty[1], int(offsets.max()) + size * len(values)))


class SharedMemory:
    """Shared memory of the blocks that run at once, in granules: the smallest access of the program.

    tag[granule]: -1 nobody wrote it; t >= 0 written, t says when and by whom; below -1: a cp.async with tag -2 - t is
    under way. Reads are kept in a log until the block's next barrier, when those of a granule that another thread wrote
    in between are found.
    """

    def __init__(self, blocks, size, granule, blocks_of_lanes, threads):
        self.size, self.granule = -(-max(size, 1) // 16) * 16, granule
        self.limit = size
        self.data = np.full(blocks * self.size, 0xFF, np.uint8)  # NaN in every type
        self.views = {n: self.data.view(t) for n, t in UINTS.items()}
        self.quads = self.data.view(np.uint32).reshape(-1, 4)
        self.tag = np.full(blocks * self.size // granule, -1, I64)
        self.block, self.thread = blocks_of_lanes, threads
        self.start = blocks_of_lanes * self.size
        self.epoch = np.zeros(blocks, I64)
        self.log, self.wrote = [], False
        self.new_epoch(np.ones(blocks, bool))

    def new_epoch(self, blocks):
        """The blocks passed a barrier."""
        if self.log:
            keep = []
            for lanes, granules, tags, origin in self.log:
                passed = blocks[self.block[lanes]]
                if self.wrote:
                    now = self.tag[granules[passed]]
                    now = np.where(now < -1, -2 - now, now)
                    mine = tags[passed].reshape((-1,) + (1,) * (now.ndim - 1))
                    bad = (now >= (mine >> THREAD_BITS << THREAD_BITS)) & (now != mine)
                    if bad.any():
                        raise PtxError("race", f"shared memory is written after this read, with no barrier in between, by thread "
                                       f"{int(now[bad][0]) & ((1 << THREAD_BITS) - 1)}").at(origin)
                if not passed.all():
                    keep.append((lanes[~passed], granules[~passed], tags[~passed], origin))
            self.log = keep
        self.wrote = self.wrote and bool(self.log)
        self.epoch[blocks] += 1
        self.base = self.epoch[self.block] << THREAD_BITS
        self.mine = self.base | self.thread

    def granules(self, addresses, size, lanes):
        if ((addresses < 0) | (addresses + size > self.limit)).any():
            bad = (addresses < 0) | (addresses + size > self.limit)
            raise PtxError("bounds", f"shared access of {size} bytes outside {self.limit}: {describe(lanes[bad], addresses[bad])}")
        check_alignment(addresses, size, lanes)
        first = (self.start[lanes] + addresses) // self.granule
        return first[:, None] + np.arange(size // self.granule) if size > self.granule else first

    def before_read(self, addresses, size, lanes, origin):
        granules = self.granules(addresses, size, lanes)
        tag = self.tag[granules]
        shape = (-1,) + (1,) * (tag.ndim - 1)
        mine = self.mine[lanes]
        bad = (tag < 0) | ((tag >= self.base[lanes].reshape(shape)) & (tag != mine.reshape(shape)))
        if bad.any():
            tag, where = tag[bad], np.argwhere(bad)[:, 0]
            told = describe(lanes[where], addresses[where])
            if (tag < -1).any():
                raise PtxError("in-flight", f"read of shared memory that a cp.async without a wait fills: {told}")
            if (tag == -1).any():
                raise PtxError("uninitialised", f"read of shared memory that nobody wrote: {told}")
            raise PtxError("race", f"read of shared memory that another thread wrote, with no barrier in between: {told}")
        self.log.append((lanes, granules, mine, origin))

    def before_write(self, addresses, size, lanes, flying=False, landing=False):
        granules = self.granules(addresses, size, lanes)
        tag = self.tag[granules]
        shape = (-1,) + (1,) * (tag.ndim - 1)
        mine = np.broadcast_to(self.mine[lanes].reshape(shape), tag.shape)
        if landing:  # the end of a cp.async
            bad = np.zeros(tag.shape, bool)
        else:
            bad = (tag < -1) | ((tag >= self.base[lanes].reshape(shape)) & (tag != mine))
        new = -2 - mine if flying else mine
        self.tag[granules] = new
        bad |= self.tag[granules] != new
        if bad.any():
            where = np.argwhere(bad)[:, 0]
            told = describe(lanes[where], addresses[where])
            if (tag[bad] < -1).any():
                raise PtxError("in-flight", f"write to shared memory that a cp.async without a wait fills: {told}")
            raise PtxError("race", f"two threads write the same shared memory, with no barrier in between: {told}")
        self.wrote = True

    def load(self, addresses, size, count, lanes, origin):
        self.before_read(addresses, size * count, lanes, origin)
        first = (self.start[lanes] + addresses) // size
        return [self.views[size][first + k] for k in range(count)]

    def store(self, addresses, size, values, lanes):
        self.before_write(addresses, size * len(values), lanes)
        first = (self.start[lanes] + addresses) // size
        for k, value in enumerate(values):
            self.views[size][first + k] = value


class LocalMemory:
    """A thread's own memory (stack)."""

    def __init__(self, lanes, size):
        self.size = -(-size // 16) * 16
        self.data = np.full(lanes * self.size, 0xFF, np.uint8)
        self.views = {n: self.data.view(t) for n, t in UINTS.items()}

    def offsets(self, addresses, size, lanes):
        check_alignment(addresses, size, lanes)
        if ((addresses < 0) | (addresses + size > self.size)).any():
            raise PtxError("bounds", f"local access of {size} bytes outside {self.size}")
        return lanes * self.size + addresses

    def load(self, addresses, size, count, lanes):
        first = self.offsets(addresses, size * count, lanes) // size
        return [self.views[size][first + k] for k in range(count)]

    def store(self, addresses, size, values, lanes):
        first = self.offsets(addresses, size * len(values), lanes) // size
        for k, value in enumerate(values):
            self.views[size][first + k] = value
