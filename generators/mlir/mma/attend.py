"""Attention of a block of query rows on tensor cores: mma.sync m16n8k16, f16 or bf16 inputs, f32 sums.

For each block of keys: S = Q K^T (K by ldmatrix), row maximum by two shuffles among the four threads that share a row,
p = exp2(c s - m), P rounded in place as the A operand (the accumulators of tiles 2 j and 2 j + 1 are its registers),
O += P V (V by ldmatrix.trans), row sums by one more product with ones. K and V come by cp.async while the products run.

A fragment: thread 4 g + t of a warp holds rows g and g + 8, columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of A; columns 2 t and
2 t + 1 of C. The carried maximum is c max, rounded, so that the rescaling and p use the same value; the sign of the scale
goes into Q, where it is exact, so that c > 0 and a masked score of -infinity gives 0.
"""
from common import LN_2, head_and_query, new_kernel, offset, place, round_pair, score_scale
from ir import HALF2, SHARED

FRAGMENT, WORD = "vector<4x2xf16>", "vector<1xi32>"
LOWEST = -3.0e38  # the maximum of a row that has seen nothing: finite, so that no difference is NaN
SUMS = "!llvm.struct<(f32, f32, f32, f32)>"


class Attend:
    def __init__(self, s):
        self.s = s
        self.tiles = {"ksm": f"memref<{s.stages}x{s.k}x{s.k_row}xf16, {SHARED}>", "vsm": f"memref<{s.stages}x{s.k}x{s.v_row}xf16, {SHARED}>"}
        if not s.qreg:
            self.tiles["qsm"] = f"memref<{s.q}x{s.k_row}xf16, {SHARED}>"
        self.kernel = new_kernel("attend", s, () if s.dynamic_bytes else tuple(self.tiles.items()))
        # 16-row tiles of this warp, steps of Q K^T, tiles of S and O, rows that a thread has.
        self.tile_rows = range(s.mt)
        self.steps, self.score_tiles, self.value_tiles = s.dk // 16, s.k // 8, s.dv // 8
        self.row_list = [(mt, r) for mt in self.tile_rows for r in range(2)]

    def text(self):
        self.prologue()
        self.load_query()
        self.loop()
        self.epilogue()
        return self.kernel.text()

    # --- before the loop

    def prologue(self):
        s, k = self.s, self.kernel
        if s.dynamic_bytes:
            memory = k.op(f"gpu.dynamic_shared_memory : memref<?xi8, {SHARED}>", f"memref<?xi8, {SHARED}>")
            for (name, type), begin in zip(self.tiles.items(), (0, s.k_bytes, s.k_bytes + s.v_bytes)):
                view = k.op(f"memref.view {memory}[{k.constant(begin, 'index')}][] : {memory.type} to {type}", type)
                setattr(k, name, view)
        tid = k.thread()
        lane, self.warp = tid & 31, tid >> 5
        self.lane = lane
        self.g, self.t2 = lane >> 2, (lane & 3) << 1
        self.place = at = place(k, s)
        self.warp_row = at.first + self.warp * (16 * s.mt)
        self.row = self.warp_row + self.g
        scale = score_scale(k)
        self.negative = scale < 0.0
        self.c = scale.max(-scale).max(1e-30)
        self.key_blocks()
        self.copies(tid)
        # ldmatrix: thread l gives row l % 8 of matrix l / 8, here relative to a 16 x 16 tile.
        low, eight, half = lane & 7, lane & 8, (lane & 16) >> 1
        self.k_at = (low + half).index(), eight.index()  # (keys 0-7, features 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15)
        self.v_at = (low + eight).index(), half.index()  # transposed: (keys 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15)
        if not s.qreg:
            self.q_at = (self.warp * (16 * s.mt) + low + eight).index(), half.index()

    def key_blocks(self):
        """Blocks [begin, end) are visited; those from `inner` to `outer` need no mask in this warp."""
        s, k, at = self.s, self.kernel, self.place

        def visible(first, last):
            """All keys that some of the rows see, all that each of them sees."""
            most = at.keys.min(last + at.high + 1).max(0)
            return (first + at.low).max(0), most, (last + at.low).max(0), at.keys.min(first + at.high + 1).max(0)
        if s.split:
            first, last = k.constant(0, "i32"), k.rows - 1
            begin, end, inner, outer = visible(first, last)
            chunk = at.split * k.chunk
            begin, end = begin.max(chunk), end.min(chunk + k.chunk)
        else:
            last_row = at.total - 1
            begin, end, _, _ = visible(at.first, (at.first + (s.q - 1)).min(last_row))
            _, _, inner, outer = visible(self.warp_row, (self.warp_row + (16 * s.mt - 1)).min(last_row))
        self.begin, self.end = begin // s.k, (end + (s.k - 1)) // s.k
        self.inner, self.outer = (inner + (s.k - 1)) // s.k, outer // s.k

    def copies(self, tid):
        """Each thread copies 16 bytes of some rows of K and V. Its part of each is a view [block][pass][8] of its own, so
        that the loop holds one pointer for each tensor in place of an address for each copy."""
        s, k, at = self.s, self.kernel, self.place
        self.copy = {}
        for name, tile, features, real in (("k", k.ksm, s.dk, k.dk), ("v", k.vsm, s.dv, k.dv)):
            chunks = features // 8
            rows = s.threads // chunks
            row, column = tid // chunks, (tid % chunks) << 3
            stride = getattr(k, f"{name}_row")
            begin = offset(k, name, ("batch", at.batch), ("head", at.kv_head)) + column.index() + row.index() * stride
            view = k.view(getattr(k, name), begin, [at.keys.index(), s.k // rows, 8], [stride * s.k, stride * rows, 1], "f16")
            # Rows past the last key, and features past the real ones, are filled with zeros.
            mine = (column < real).select(at.keys - row, -(1 << 30))
            self.copy[name] = view, tile, row.index(), column.index(), rows, mine

    def stage(self, name, block, buffer):
        view, tile, row, column, rows, mine = self.copy[name]
        k, s = self.kernel, self.s
        left, tokens = mine - block * s.k, []
        for i in range(s.k // rows):
            count = (left > i * rows).select(k.constant(8, "index"), 0)
            tokens.append(k.op(f"nvgpu.device_async_copy {view}[{k.at([block, i, 0])}], {tile}[{k.at([buffer, row + i * rows, column])}], 8, {count} "
                               f"{{bypassL1}} : {view.type} to {tile.type}", "!nvgpu.device.async.token"))
        k.op(f"nvgpu.device_async_create_group {', '.join(map(str, tokens))}", "!nvgpu.device.async.token")

    def wait(self):
        self.kernel.line("nvvm.cp.async.wait.group 0")  # nvgpu.device_async_wait wants a token, carried by the loop
        self.kernel.barrier()

    # --- Q

    def query_view(self, row):
        k, s = self.kernel, self.s
        head, query = head_and_query(k, s, self.place, row.min(self.place.total - 1))
        begin = offset(k, "q", ("batch", self.place.batch), ("head", head), ("row", query))
        return k.view(k.q, begin, [s.dk], [1], "f16")

    def flip(self, words):
        """The sign of the scale, by exclusive or: exact for every number."""
        k = self.kernel
        mask = self.negative.select(k.constant(-2147450880, "i32"), 0)  # 0x80008000
        wide = k.op(f"vector.broadcast {mask} : i32 to {words.type}", words.type) if words.type.startswith("vector") else mask
        return words ^ wide

    def load_query(self):
        s, k = self.s, self.kernel
        self.fragments = {}
        if not s.qreg:
            return self.stage_query()
        for mt in self.tile_rows:
            views = [self.query_view(self.row + (16 * mt + 8 * r)) for r in range(2)]
            for step in range(self.steps):
                parts = []
                for x in range(4):
                    first = 16 * step + 8 * (x // 2)
                    real = k.dk > first  # uniform: dk is a multiple of 8
                    word = k.load(views[x % 2], [real.select(self.t2 + first, 0)], HALF2)
                    word = real.select(k.bitcast(word, "i32"), 0)
                    parts.append(k.bitcast(self.flip(word), HALF2))
                self.fragments[mt, step] = parts
        self.first_copies()

    def stage_query(self):
        s, k = self.s, self.kernel
        _, _, row, column, rows, _ = self.copy["k"]
        for i in range(s.q // rows):
            view = self.query_view(self.place.first + (row.i32() + i * rows))
            real = column.i32() < k.dk
            words = k.bitcast(k.load(view, [real.select(column.i32(), 0)], "vector<8xf16>"), "vector<4xi32>")
            zero = k.op("arith.constant dense<0> : vector<4xi32>", "vector<4xi32>")
            words = k.op(f"arith.select {real}, {words}, {zero} : vector<4xi32>", "vector<4xi32>")
            k.store(k.bitcast(self.flip(words), "vector<8xf16>"), k.qsm, [row + i * rows, column])
        self.first_copies()

    def first_copies(self):
        buffer = (self.begin & 1) if self.s.stages == 2 else 0
        self.stage("k", self.begin, buffer)
        if self.s.stages == 2:
            self.stage("v", self.begin, buffer)

    # --- the loop over key blocks

    def load_matrices(self, memory, indices, transpose=False):
        k = self.kernel
        fragment = k.op(f"nvgpu.ldmatrix {memory}[{k.at(indices)}] {{numTiles = 4 : i32, transpose = {str(transpose).lower()}}} "
                        f": {memory.type} -> {FRAGMENT}", FRAGMENT)
        return [k.part(fragment, i, HALF2) for i in range(4)]

    def mma(self, a, b, c):
        k, word = self.kernel, "i32" if self.s.type == "bf16" else HALF2
        types = "multiplicandAPtxType = #nvvm.mma_type<bf16>, multiplicandBPtxType = #nvvm.mma_type<bf16>, " if word == "i32" else ""
        a, b = ([str(k.bitcast(x, word)) for x in operand] for operand in (a, b))
        sums = k.op(f"nvvm.mma.sync A[{', '.join(a)}] B[{', '.join(b)}] C[{', '.join(map(str, c))}] {{layoutA = #nvvm.mma_layout<row>, "
                    f"layoutB = #nvvm.mma_layout<col>, {types}shape = #nvvm.shape<m = 16, n = 8, k = 16>}} : ({word}, {word}, f32) -> {SUMS}", SUMS)
        return [k.op(f"llvm.extractvalue {sums}[{i}] : {SUMS}", "f32") for i in range(4)]

    def loop(self):
        s, k = self.s, self.kernel
        zero = k.constant(0.0, "f32")
        outputs = [zero] * (4 * s.mt * self.value_tiles)
        initial = outputs + [k.constant(LOWEST, "f32")] * (2 * s.mt) + [zero] * (2 * s.mt)
        self.state = self.unpack(k.for_(self.begin, self.end, 1, self.block, initial))

    def unpack(self, values):
        """O's tiles (four numbers each), maxima and sums of the rows."""
        n = 4 * self.s.mt * self.value_tiles
        tiles = {}
        for i, (mt, j) in enumerate((mt, j) for mt in self.tile_rows for j in range(self.value_tiles)):
            tiles[mt, j] = list(values[4 * i:4 * i + 4])
        rows = len(self.row_list)
        return tiles, list(values[n:n + rows]), list(values[n + rows:])

    def pack(self, tiles, maxima, sums):
        return [x for mt in self.tile_rows for j in range(self.value_tiles) for x in tiles[mt, j]] + maxima + sums

    def block(self, block, *carried):
        s, k = self.s, self.kernel
        self.wait()
        following = block + 1
        more = following < self.end
        if s.stages == 1:
            buffer = k.constant(0, "index")
            self.stage("v", block, buffer)
        else:
            buffer, other = (block & 1).index(), ((block & 1) ^ 1).index()
            k.if_(more, lambda: (self.stage("k", following, other), self.stage("v", following, other)) and [])
        scores = self.scores(buffer)
        if s.stages == 1:
            self.wait()
            k.if_(more, lambda: self.stage("k", following, buffer))
        scores = self.mask(block, scores)
        tiles, old, sums = self.unpack(carried)
        new = self.maxima(scores, old)
        tiles, maxima, sums = self.rescale(carried, old, new)
        return self.values(buffer, scores, tiles, maxima, sums)

    def scores(self, buffer):
        k, zero = self.kernel, self.kernel.constant(0.0, "f32")
        scores = {(mt, j): [zero] * 4 for mt in self.tile_rows for j in range(self.score_tiles)}
        for step in range(self.steps):
            if not self.s.qreg:
                for mt in self.tile_rows:
                    self.fragments[mt, step] = self.load_matrices(k.qsm, [self.q_at[0] + 16 * mt, self.q_at[1] + 16 * step])
            for j in range(0, self.score_tiles, 2):
                keys = self.load_matrices(k.ksm, [buffer, self.k_at[0] + 8 * j, self.k_at[1] + 16 * step])
                for x in range(2):
                    for mt in self.tile_rows:
                        scores[mt, j + x] = self.mma(self.fragments[mt, step], keys[2 * x:2 * x + 2], scores[mt, j + x])
        return scores

    def mask(self, block, scores):
        """-infinity for the keys that a row does not see; a branch that most blocks skip."""
        s, k, at = self.s, self.kernel, self.place
        tiles = list(scores)
        edge = (block >= self.outer) | (block < self.inner)

        def masked():
            here = block * s.k + self.t2
            last = at.keys - here
            result = []
            begins, ends = {}, {}
            for mt, r in self.row_list:
                row = self.row + (16 * mt + 8 * r)
                if s.split:
                    row = row.min(at.total - 1) % k.rows
                begins[mt, r], ends[mt, r] = row + at.low - here, last.min(row + at.high + 1 - here)
            for mt, j in tiles:
                for i, score in enumerate(scores[mt, j]):
                    key, row = 8 * j + i % 2, (mt, i // 2)
                    seen = (ends[row] > key) & (begins[row] <= key)
                    result.append(seen.select(score, k.constant("-inf", "f32")))
            return result
        flat = [x for t in tiles for x in scores[t]]
        flat = k.if_(edge, masked, lambda: flat, ["f32"] * len(flat))
        return {t: flat[4 * i:4 * i + 4] for i, t in enumerate(tiles)}

    def maxima(self, scores, old):
        k, result = self.kernel, []
        for (mt, r), before in zip(self.row_list, old):
            largest = k.largest([scores[mt, j][2 * r + e] for j in range(self.score_tiles) for e in range(2)])
            for distance in (1, 2):
                largest = largest.max(k.shuffle("xor", largest, distance))
            result.append(before.max(largest * self.c))
        return result

    def rescale(self, carried, old, new):
        k = self.kernel
        tiles, _, sums = self.unpack(carried)

        def scaled():
            factors = {row: k.exp2(a - b) for row, a, b in zip(self.row_list, old, new)}
            moved = {(mt, j): [x * factors[mt, i // 2] for i, x in enumerate(tile)] for (mt, j), tile in tiles.items()}
            return self.pack(moved, new, [x * factors[row] for row, x in zip(self.row_list, sums)])
        if not self.s.lazy:
            return self.unpack(scaled())
        # Exact all the same: the old maximum serves as well, as long as P does not overflow.
        growth = k.largest([b - a for a, b in zip(old, new)])
        vote = k.any_of_warp(growth > float(self.s.lazy))
        return self.unpack(k.if_(vote, scaled, lambda: list(carried), [v.type for v in carried]))

    def values(self, buffer, scores, tiles, maxima, sums):
        """O += P V and the row sums of P, which are those of the rounded P."""
        s, k = self.s, self.kernel
        weights = {}
        for (mt, r), maximum in zip(self.row_list, maxima):
            minus = -maximum
            for j in range(self.score_tiles):
                weights[mt, j, r] = round_pair(k, s, *[k.exp2(k.fma(scores[mt, j][2 * r + e], self.c, minus)) for e in range(2)])
        ones = [k.bitcast(k.constant(0x3F803F80 if s.type == "bf16" else 0x3C003C00, "i32"), HALF2)] * 2
        zero = k.constant(0.0, "f32")
        totals = {mt: [zero] * 4 for mt in self.tile_rows}
        for step in range(s.k // 16):
            a = {mt: [weights[mt, 2 * step + j, r] for j in range(2) for r in range(2)] for mt in self.tile_rows}
            for mt in self.tile_rows:
                totals[mt] = self.mma(a[mt], ones, totals[mt])
            for j in range(0, self.value_tiles, 2):
                values = self.load_matrices(k.vsm, [buffer, self.v_at[0] + 16 * step, self.v_at[1] + 8 * j], True)
                for x in range(2):
                    for mt in self.tile_rows:
                        tiles[mt, j + x] = self.mma(a[mt], values[2 * x:2 * x + 2], tiles[mt, j + x])
        sums = [x + totals[mt][2 * r] for (mt, r), x in zip(self.row_list, sums)]
        return self.pack(tiles, maxima, sums)

    # --- after the loop

    def epilogue(self):
        """O / l; 0 and -infinity for a row that saw nothing."""
        s, k, at = self.s, self.kernel, self.place
        tiles, maxima, sums = self.state
        k.line("nvvm.cp.async.wait.group 0")  # of the first copies, where no block was visited
        wants_lse = k.address(k.lse).differs(0)
        wrong = k.constant(0.0, "f32")  # stays 0 as long as everything is finite
        for (mt, r), maximum, total in zip(self.row_list, maxima, sums):
            row = self.row + (16 * mt + 8 * r)
            empty = total.equals(0.0)
            inverse = k.reciprocal(empty.select(1.0, total))
            out = {j: [x * inverse for x in tiles[mt, j][2 * r:2 * r + 2]] for j in range(self.value_tiles)}
            for pair in out.values():
                for x in pair:
                    wrong = k.fma(x, k.constant(0.0, "f32"), wrong)

            def store():
                head, query = head_and_query(k, s, at, row)
                steps = [("batch", at.batch), ("head", head), ("row", query)] + ([("split", at.split)] if s.split else [])
                view = k.view(k.o, offset(k, "o", *steps), [s.dv], [1], "f32" if s.split else "f16")
                for j, pair in out.items():
                    rounded = k.pair(*pair) if s.split else round_pair(k, s, *pair)
                    k.if_(k.dv > 8 * j, lambda: k.store(rounded, view, [self.t2 + 8 * j]))

                def store_lse():
                    value = empty.select(k.constant("-inf", "f32"), (maximum + k.log2(total)) * LN_2)
                    k.store(value, k.view(k.lse, offset(k, "lse", *steps), [1], [1], "f32"), [0])
                first = self.t2.equals(0)
                k.if_(first & wants_lse, store_lse)
            k.if_(row < at.total, store)
        bad = k.any_of_warp(wrong.differs(0.0))

        def report():
            word = bad.select(k.constant(1, "i32"), 0)
            k.store(word, k.view(k.flags, 0, [1 << 30], [1], "i32"), [at.flag + self.warp])
        k.if_(self.lane.equals(0), report)

