// Schedule of mlir_rowblock. The payload has no loop: scores, softmax and matmul are one operation each, over all visible keys
// of the rows. All blocking comes from here. The same register tiles as mlir_flash, so that comparing the two shows what the
// strategies do: here the accumulators of the matmul stay in registers over all keys and nothing is ever rescaled, but
// every score goes through the L2 cache. $name is a knob's value; the lines between each-block and end are repeated for each
// number of query rows.
module attributes {transform.with_named_sequence} {
// attune: include tiles.mlir
// attune: include stages.mlir

transform.named_sequence @__transform_main(%m: !transform.any_op {transform.readonly}) {
  // Accumulators are score_rows x one panel, and matmul_rows x matmul_cols: 24 of 32 registers with AVX-512 (28 spill), 12
  // of 16 with AVX2.
  // attune: each-block
  %f$rows = transform.structured.match ops{["func.func"]} attributes {rows = $rows : i64} in %m : (!transform.any_op) -> !transform.any_op // attune: some
  %score_rows$rows = transform.tune.knob<"score_rows"> = $score_rows from options = [1, 2, 4, 6, 8, 12, 16, 24] -> !transform.param<i64>
  %matmul_rows$rows = transform.tune.knob<"matmul_rows"> = $matmul_rows from options = [1, 2, 4, 6, 8, 12, 16, 24] -> !transform.param<i64>
  %matmul_cols$rows = transform.tune.knob<"matmul_cols"> = $matmul_cols from options = [8, 16, 32, 64] -> !transform.param<i64>
  %fold_rows$rows = transform.tune.knob<"fold_rows"> = $fold_rows from options = [1, 2, 4, 6, 8, 12, 16, 24] -> !transform.param<i64>
  transform.foreach %f$rows : !transform.any_op {
  ^bb0(%one: !transform.any_op):
    transform.include @block_stages failures(propagate) (%one, %score_rows$rows, %matmul_rows$rows, %matmul_cols$rows, %fold_rows$rows)
      : (!transform.any_op, !transform.param<i64>, !transform.param<i64>, !transform.param<i64>, !transform.param<i64>) -> ()
  }
  // attune: end
  transform.include @vectorise failures(propagate) (%m) : (!transform.any_op) -> ()
  transform.yield
}
}
