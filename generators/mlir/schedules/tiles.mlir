// Pieces of the schedules: how one tagged operation of the payload becomes loops around a register tile. Included by the
// strategies' files. Vectors are made after this, from whatever static shape is left inside the loops.
//
// In these files, "attune: some" behind a match makes it an error when it finds nothing; by itself, every later step would
// silently do nothing. (attune_mlir_gen.py adds the check, so that the error tells the line of the match.)

// S: loops over panels and rows, then over d, one feature at a time: `rows` x one panel of accumulators in registers. The
// zero fill is fused, so that they start as constants. tile_using_forall, because fuse_into_containing_op follows an init
// operand only through scf.forall.
transform.named_sequence @score_tile(%ops: !transform.any_op {transform.consumed}, %rows: !transform.param<i64> {transform.readonly}) {
  transform.foreach %ops : !transform.any_op {
  ^bb0(%op: !transform.any_op):
    %fill = transform.get_producer_of_operand %op[2] : (!transform.any_op) -> !transform.any_op
    %t, %l = transform.structured.tile_using_forall %op tile_sizes [1, %rows, 0, 0] : (!transform.any_op, !transform.param<i64>) -> (!transform.any_op, !transform.any_op)
    %f, %n = transform.structured.fuse_into_containing_op %fill into %l : (!transform.any_op, !transform.any_op) -> (!transform.any_op, !transform.any_op)
    %t2, %l2 = transform.structured.tile_using_for %t tile_sizes [0, 0, 0, 1] : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
  }
  transform.yield
}

// O += P V: one key at a time; the accumulators, `rows` x `cols`, stay in registers over all keys.
transform.named_sequence @matmul_tile(%ops: !transform.any_op {transform.consumed}, %rows: !transform.param<i64> {transform.readonly}, %cols: !transform.param<i64> {transform.readonly}) {
  transform.foreach %ops : !transform.any_op {
  ^bb0(%op: !transform.any_op):
    %t, %l:4 = transform.structured.tile_using_for %op tile_sizes [%rows, %cols, 1, 1] : (!transform.any_op, !transform.param<i64>, !transform.param<i64>) -> (!transform.any_op, !transform.any_op, !transform.any_op, !transform.any_op, !transform.any_op)
  }
  transform.yield
}
transform.named_sequence @matmul_rest_tile(%ops: !transform.any_op {transform.consumed}, %rows: !transform.param<i64> {transform.readonly}, %cols: !transform.param<i64> {transform.readonly}) {
  transform.foreach %ops : !transform.any_op {
  ^bb0(%op: !transform.any_op):
    %t, %l:3 = transform.structured.tile_using_for %op tile_sizes [%rows, %cols, 1] : (!transform.any_op, !transform.param<i64>, !transform.param<i64>) -> (!transform.any_op, !transform.any_op, !transform.any_op, !transform.any_op)
  }
  transform.yield
}

// Horizontal reductions of `rows` rows at a time: their chains of shuffles overlap.
transform.named_sequence @fold_tile(%ops: !transform.any_op {transform.consumed}, %rows: !transform.param<i64> {transform.readonly}) {
  transform.foreach %ops : !transform.any_op {
  ^bb0(%op: !transform.any_op):
    %t, %l = transform.structured.tile_using_for %op tile_sizes [%rows, 0] : (!transform.any_op, !transform.param<i64>) -> (!transform.any_op, !transform.any_op)
  }
  transform.yield
}

// The maximum over the panels, lane by lane: a row, its fill fused, then one panel at a time.
transform.named_sequence @lane_max_tile(%ops: !transform.any_op {transform.consumed}) {
  transform.foreach %ops : !transform.any_op {
  ^bb0(%op: !transform.any_op):
    %fill = transform.get_producer_of_operand %op[1] : (!transform.any_op) -> !transform.any_op
    %t, %l = transform.structured.tile_using_forall %op tile_sizes [1, 0, 0] : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %f, %n = transform.structured.fuse_into_containing_op %fill into %l : (!transform.any_op, !transform.any_op) -> (!transform.any_op, !transform.any_op)
    %t1, %l1 = transform.structured.tile_using_for %t tile_sizes [0, 1, 0] : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
  }
  transform.yield
}

// From tiled linalg operations to vectors. Unit dimensions go first: a contraction with one k becomes a broadcast
// multiply-add; left in place, the two unit reduction dimensions of the matmul would lower to multiply and add apart (-8 %).
transform.named_sequence @vectorise(%m: !transform.any_op {transform.readonly}) {
  %f1 = transform.structured.match ops{["func.func"]} in %m : (!transform.any_op) -> !transform.any_op
  transform.apply_patterns to %f1 {
    transform.apply_patterns.canonicalization
    transform.apply_patterns.tensor.merge_consecutive_insert_extract_slice
    transform.apply_patterns.linalg.tiling_canonicalization
    transform.apply_patterns.linalg.fold_unit_extent_dims_via_slices } : !transform.any_op
  transform.apply_cse to %f1 : !transform.any_op
  transform.foreach %f1 : !transform.any_op {
  ^bb0(%f: !transform.any_op):
    %f2 = transform.structured.vectorize_children_and_apply_patterns %f : (!transform.any_op) -> !transform.any_op
    transform.apply_patterns to %f2 { transform.apply_patterns.canonicalization } : !transform.any_op
    %loops = transform.structured.match interface{LoopLikeInterface} in %f2 : (!transform.any_op) -> !transform.any_op
    transform.apply_licm to %loops : !transform.any_op
    transform.apply_patterns to %f2 {
      transform.apply_patterns.vector.lower_masked_transfers // buffer deallocation breaks vector.mask
      transform.apply_patterns.vector.cast_away_vector_leading_one_dim
      transform.apply_patterns.tensor.fold_tensor_subset_ops_into_vector_transfers
      transform.apply_patterns.canonicalization } : !transform.any_op
    // Accumulators leave memory: pairs of transfer_read and transfer_write become vectors that the loop carries.
    %loops2 = transform.structured.match ops{["scf.for"]} in %f2 : (!transform.any_op) -> !transform.any_op
    transform.loop.hoist_loop_invariant_subsets %loops2 : !transform.any_op
    transform.apply_patterns to %f2 { transform.apply_patterns.canonicalization } : !transform.any_op
    transform.apply_cse to %f2 : !transform.any_op
  }
  transform.yield
}
