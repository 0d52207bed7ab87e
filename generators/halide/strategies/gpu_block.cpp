// gpu_block: one pass on a GPU. A workgroup takes a block of query rows, walks over the blocks of keys that some of its
// rows see, and keeps the state (O, m, l) in registers; Q, K and V pass through shared memory. O(tile) memory.
//
//   for each key block kb:  S = Q K^T, M_kb = row maximum, P = 2^(S - M_kb), L_kb = row sum, O_kb = P V
//                           (m, l, O) = merge((m, l, O), (M_kb, L_kb, O_kb))
//
// The softmax is local to the block, as in flash. A thread (x, y) of TX x TY has TI rows y, y + TY, … and, for the
// scores, TJ keys x, x + TX, …; for the output, columns in groups of 4: x * 4, x * 4 + 4 TX, ….
//
// Private Funcs. State, scores, weights and products must live in a thread's registers, across barriers and the loop
// over key blocks. So a thread's coordinates are no dimensions of these Funcs' storage; they are reduction variables of
// their updates, which run over all threads. Halide makes one copy of a register allocation for each thread. Three
// rules: all of them map (x, y) to threads alike; what a thread reads of them it has written itself; every index is a
// constant after unrolling, or the array goes to local memory. An update that has no need of x and y mentions them
// times zero, which folds away. Their pure definition is undef: a fill by one thread would be no use.
#include "gpu_phases.h"

namespace attune_gen {

class GpuBlock : public GpuPhase<GpuBlock> {
  public:
    // TI rows x TJ keys of scores are a thread's accumulators: 4 x 8 gives 128 multiply-adds for 12 loads of 16 bytes
    // from shared memory, in 168 registers. 8 x 8 spills on CUDA (255 registers, up to 52 bytes).
    GeneratorParam<int> ti{"ti", 4}, tj{"tj", 8}, tx{"tx", 8}, ty{"ty", 16};
    // Of Q and K, dc features at a time lie in shared memory; of V, kc keys. 16 keep within Vulkan's 32 KiB.
    GeneratorParam<int> dc{"dc", 16}, kc{"kc", 16};
    GeneratorParam<int> unroll_d{"unroll_d", 4}, unroll_k{"unroll_k", 4};
    Out<Func> out{"out", 4}; // (c, i, h, b): O, bits of LSE

    void generate() {
        launched_by_batch = true;
        bq = int(ti) * int(ty), bk = int(tj) * int(tx), columns_of_thread = int(dv) / int(tx);
        define();
        schedule();
    }

  private:
    static constexpr int kWidth = 4; // floats of one load from shared memory
    int bq = 0, bk = 0, columns_of_thread = 0;
    Var qb{"qb"}, kb{"kb"}, ii{"ii"}, jj{"jj"}, cc{"cc"}, x{"x"}, y{"y"};
    Func q_tile{"q_tile"}, k_tile{"k_tile"}, v_tile{"v_tile"};
    Func score{"score"}, part_max{"part_max"}, block_max{"block_max"}, weight{"weight"}, weights{"weights"},
        product{"product"}, state{"state"}, part_sum{"part_sum"}, row_end{"row_end"}, result{"result"};
    RDom score_init, score_sum, score_shape, score_edge, weigh, product_init, product_sum, state_init, state_merge, end;

    static Expr mention(const RVar &x, const RVar &y) { return 0.0f * cast<float>(x + y); }
    RDom threads(const std::string &name) { return RDom(0, int(tx), 0, int(ty), name); }

    void define() {
        const int TI = ti, TJ = tj, TX = tx, TY = ty, DC = dc, KC = kc, C = columns_of_thread;
        const Expr first_row = qb * bq, last_row = min(qb * bq + bq, rows) - 1;
        // Keys that some row of the block sees lie in [begin, finish); all its rows see [all_begin, all_finish).
        const Expr begin = first_key(first_row, b), finish = clamp(end_key(last_row, b), 0, num_keys);
        const Expr all_begin = first_key(last_row, b), all_finish = end_key(first_row, b);
        const Expr first_block = begin / bk, last_block = (finish + bk - 1) / bk;
        const Expr whole = kb * bk >= all_begin && kb * bk + bk <= all_finish;

        q_tile(d, i, qb, h, b) = query_at(d, qb * bq + i, h, b);
        k_tile(d, j, kb, h, b) = key_at(d, kb * bk + j, h, b);
        // A key that no row of the block sees must not spoil them with a NaN: its weight is 0, and 0 * NaN is not.
        const Expr v_key = kb * bk + j;
        v_tile(c, j, qb, kb, h, b) = select(v_key >= begin && v_key < finish, value_at(c, v_key, h, b), 0.0f);

        score_init = threads("si"), score_shape = threads("sh"), score_edge = threads("se");
        score_sum = RDom(0, DC, 0, TX, 0, TY, 0, int(dk) / DC, "ss");
        const RDom &t = score_sum;
        score(jj, ii, qb, kb, h, b) = undef<float>();
        score(jj, ii, qb, kb, h, b) = mention(score_init.x, score_init.y);
        score(jj, ii, qb, kb, h, b) +=
            q_tile(t.w * DC + t.x, ii * TY + t.z, qb, h, b) * k_tile(t.w * DC + t.x, jj * TX + t.y, kb, h, b);
        // Whole blocks pay for neither: both conditions are the same for all threads.
        const auto place = [&](const RDom &r, const std::function<Expr(Expr, Expr, Expr)> &f) {
            const Expr s = score(jj, ii, qb, kb, h, b);
            score(jj, ii, qb, kb, h, b) = f(s, kb * bk + jj * TX + r.x, qb * bq + ii * TY + r.y);
        };
        score_shape.where(use_extras(b));
        place(score_shape, [&](const Expr &s, const Expr &j, const Expr &i) { return full_score(s, j, i, h, b); });
        score_edge.where(!use_extras(b) && !whole);
        place(score_edge, [&](const Expr &s, const Expr &j, const Expr &i) { return edge_score(s, j, i, b); });

        // Row maximum: of each thread's keys, then across the threads of the row.
        Expr most = score(0, ii, qb, kb, h, b);
        for (int n = 1; n < TJ; n++) most = max(most, score(n, ii, qb, kb, h, b));
        part_max(x, ii, y, qb, kb, h, b) = most;
        most = part_max(0, ii, y, qb, kb, h, b);
        for (int n = 1; n < TX; n++) most = max(most, part_max(n, ii, y, qb, kb, h, b));
        block_max(ii, y, qb, kb, h, b) = most;

        // Slots up to TJ: weights; slot TJ: the block's maximum.
        weigh = threads("w");
        const Expr m = block_max(ii, weigh.y, qb, kb, h, b);
        weight(jj, ii, qb, kb, h, b) = undef<float>();
        weight(jj, ii, qb, kb, h, b) =
            select(jj == TJ, m, exp2_device((score(min(jj, TJ - 1), ii, qb, kb, h, b) - m) * unit)) +
            mention(weigh.x, weigh.y);
        weights(j, ii, y, qb, kb, h, b) = weight(j / TX, ii, qb, kb, h, b); // the same, for all threads of the row

        product_init = threads("pi");
        product_sum = RDom(0, KC, 0, TX, 0, TY, 0, bk / KC, "ps");
        const RDom &u = product_sum;
        product(cc, ii, qb, kb, h, b) = undef<float>();
        product(cc, ii, qb, kb, h, b) = mention(product_init.x, product_init.y);
        product(cc, ii, qb, kb, h, b) +=
            weights(u.w * KC + u.x, ii, u.z, qb, kb, h, b) *
            v_tile((cc / kWidth) * TX * kWidth + u.y * kWidth + cc % kWidth, u.w * KC + u.x, qb, kb, h, b);

        // The state: columns of O, then m, then l of this thread's keys.
        state_init = threads("i");
        state_merge = RDom(0, TX, 0, TY, 0, (num_keys + bk - 1) / bk, "k");
        const RDom &r = state_merge;
        state_merge.where(r.z >= first_block && r.z < last_block);
        const Expr block = r.z;
        std::vector<Expr> now(size_t(C + 2), undef<float>());
        state(ii, qb, h, b) = Tuple(now);
        for (int n = 0; n < C + 2; n++)
            now[size_t(n)] = (n == C ? Expr(kInvisible) : 0.0f) + mention(state_init.x, state_init.y);
        state(ii, qb, h, b) = Tuple(now);
        const FuncRef old = state(ii, qb, h, b);
        const Merged x_ = merge(old[C], weight(TJ, ii, qb, block, h, b));
        for (int n = 0; n < C; n++) now[size_t(n)] = old[n] * x_.keep + product(n, ii, qb, block, h, b) * x_.add;
        Expr sum = weight(0, ii, qb, block, h, b);
        for (int n = 1; n < TJ; n++) sum += weight(n, ii, qb, block, h, b);
        now[size_t(C)] = x_.max;
        now[size_t(C + 1)] = old[C + 1] * x_.keep + sum * x_.add + mention(r.x, r.y);
        state(ii, qb, h, b) = Tuple(now);

        end = threads("e");
        part_sum(x, ii, y, qb, h, b) = state(ii, qb, h, b)[C + 1];
        Expr l = part_sum(0, ii, end.y, qb, h, b);
        for (int n = 1; n < TX; n++) l += part_sum(n, ii, end.y, qb, h, b);
        const RowEnd e = finish_row(state(ii, qb, h, b)[C], l, h);
        row_end(ii, qb, h, b) = Tuple(undef<float>(), undef<uint32_t>());
        row_end(ii, qb, h, b) = Tuple(e.factor + mention(end.x, end.y), e.lse + cast<uint32_t>(0 * (end.x + end.y)));

        // Chains of selects, not an index: one that does not fold would put the state into local memory.
        const Expr block_of_row = i / bq, row = (i % bq) / TY, column = (c / (TX * kWidth)) * kWidth + c % kWidth;
        std::vector<Expr> o, lse;
        for (int n = 0; n < TI; n++) {
            Expr e = state(n, block_of_row, h, b)[0];
            for (int m = 1; m < C; m++) e = select(column == m, state(n, block_of_row, h, b)[m], e);
            o.push_back(e * row_end(n, block_of_row, h, b)[0]);
            lse.push_back(row_end(n, block_of_row, h, b)[1]);
        }
        Expr o_value = o[0], lse_value = lse[0];
        for (int n = 1; n < TI; n++)
            o_value = select(row == n, o[size_t(n)], o_value), lse_value = select(row == n, lse[size_t(n)], lse_value);
        result(c, i, h, b) = Tuple(store(o_value), lse_value);
        out = result;
    }

    // Registers of each thread.
    void make_private(Func f, int updates) {
        for (int u = 0; u < updates; u++) f.update(u).allow_race_conditions();
        f.store_in(MemoryType::Register);
        for (const Var &v : f.args())
            if (v.name() == ii.name())
                f.bound(ii, 0, int(ti));
            else if (v.name() != jj.name() && v.name() != cc.name())
                f.bound_extent(v, 1);
    }

    // A copy of a tile (a: features, r: rows of it) by all threads, one element after the other: strides are the
    // caller's. Rows are padded so that the loads of 16 bytes of a warp meet no bank twice.
    void stage(Func f, const Var &a, const Var &r, int width, int height, int pad) {
        const int n = int(tx) * int(ty);
        Var t("t"), to("to"), tt("tt");
        f.store_in(MemoryType::GPUShared).bound_extent(a, width).bound_extent(r, height).fuse(a, r, t);
        f.split(t, to, t, n, width * height % n ? TailStrategy::GuardWithIf : TailStrategy::RoundUp);
        f.split(t, tt, t, int(tx)).reorder(to, t, tt).gpu_threads(t, tt);
        if (pad) f.align_storage(a, width + pad);
    }

    void schedule() {
        const int TI = ti, TJ = tj, TX = tx, TY = ty, C = columns_of_thread;
        Var ir("ir"), co("co"), cr("cr"), ci("ci"), jo("jo"), ji("ji");
        promise_inputs();
        promise_outputs(result);
        result.split(i, qb, ir, bq, TailStrategy::GuardWithIf).split(ir, ii, y, TY);
        result.split(c, co, cr, TX * kWidth, TailStrategy::GuardWithIf).split(cr, x, ci, kWidth);
        result.reorder(ci, co, ii, x, y, qb, h, b).unroll(ci).unroll(ii).gpu_blocks(qb, h, b).gpu_threads(x, y);

        state.compute_at(result, qb);
        make_private(state, 2);
        const auto per_thread = [](Stage s, const std::vector<VarOrRVar> &inner, const RVar &x, const RVar &y,
                                   const std::vector<VarOrRVar> &outer = {}) {
            std::vector<VarOrRVar> order = inner;
            order.push_back(x), order.push_back(y);
            order.insert(order.end(), outer.begin(), outer.end());
            s.reorder(order).gpu_threads(x, y);
            for (const VarOrRVar &v : inner) s.unroll(v);
        };
        const RVar k = state_merge.z;
        per_thread(state.update(0), {ii}, state_init.x, state_init.y);
        per_thread(state.update(1), {ii}, state_merge.x, state_merge.y, {k});

        q_tile.compute_at(score, score_sum.w);
        stage(q_tile, d, i, dc, bq, kWidth);
        k_tile.compute_at(score, score_sum.w);
        stage(k_tile, d, j, dc, bk, kWidth);
        v_tile.compute_at(product, product_sum.w);
        stage(v_tile, c, j, dv, kc, 0);

        score.compute_at(state, k).bound(jj, 0, TJ);
        make_private(score, 4);
        per_thread(score.update(0), {jj, ii}, score_init.x, score_init.y);
        {
            RVar ro("ro"), ri("ri");
            Stage s = score.update(1);
            s.split(score_sum.x, ro, ri, int(unroll_d)).reorder(jj, ii, ri, ro, score_sum.y, score_sum.z, score_sum.w);
            s.unroll(jj).unroll(ii).unroll(ri).gpu_threads(score_sum.y, score_sum.z);
            for (Func f : {q_tile.in(score), k_tile.in(score)})
                f.compute_at(score, ro).vectorize(f.args()[0]).unroll(f.args()[1]);
        }
        per_thread(score.update(2), {jj, ii}, score_shape.x, score_shape.y);
        per_thread(score.update(3), {jj, ii}, score_edge.x, score_edge.y);

        for (Func f : {part_max, part_sum}) {
            f.store_in(MemoryType::GPUShared).bound(ii, 0, TI).bound(x, 0, TX).bound(y, 0, TY);
            f.reorder(ii, x, y).unroll(ii).gpu_threads(x, y);
        }
        part_max.compute_at(state, k);
        weight.compute_at(state, k).bound(jj, 0, TJ + 1);
        make_private(weight, 1);
        per_thread(weight.update(0), {jj, ii}, weigh.x, weigh.y);
        block_max.compute_at(weight, weigh.x).bound(ii, 0, TI).unroll(ii);
        weights.compute_at(state, k).store_in(MemoryType::GPUShared).bound(j, 0, bk).bound(ii, 0, TI).bound(y, 0, TY);
        weights.split(j, jo, ji, TX).reorder(jo, ii, ji, y).unroll(jo).unroll(ii).gpu_threads(ji, y);
        product.compute_at(state, k).bound(cc, 0, C);
        make_private(product, 2);
        per_thread(product.update(0), {cc, ii}, product_init.x, product_init.y);
        {
            RVar ro("ro"), ri("ri");
            Stage s = product.update(1);
            s.split(product_sum.x, ro, ri, int(unroll_k));
            s.reorder(cc, ii, ri, ro, product_sum.y, product_sum.z, product_sum.w);
            s.unroll(cc).unroll(ii).unroll(ri).gpu_threads(product_sum.y, product_sum.z);
            Func f = weights.in(product);
            f.compute_at(product, ro).vectorize(f.args()[0]).unroll(f.args()[1]);
        }
        part_sum.compute_at(result, qb);
        row_end.compute_at(result, qb);
        make_private(row_end, 1);
        per_thread(row_end.update(0), {ii}, end.x, end.y);
    }
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::GpuBlock, gpu_block)
