// The stages of one block of query rows, shared by the strategies; %f: functions of one number of rows.
transform.named_sequence @block_stages(%f: !transform.any_op {transform.readonly}, %score_rows: !transform.param<i64> {transform.readonly},
    %matmul_rows: !transform.param<i64> {transform.readonly}, %matmul_cols: !transform.param<i64> {transform.readonly},
    %fold_rows: !transform.param<i64> {transform.readonly}) {
  %score = transform.structured.match attributes {tag = "score"} in %f : (!transform.any_op) -> !transform.any_op // attune: some
  transform.include @score_tile failures(propagate) (%score, %score_rows) : (!transform.any_op, !transform.param<i64>) -> ()

  %matmul = transform.structured.match attributes {tag = "matmul"} in %f : (!transform.any_op) -> !transform.any_op // attune: some
  transform.include @matmul_tile failures(propagate) (%matmul, %matmul_rows, %matmul_cols) : (!transform.any_op, !transform.param<i64>, !transform.param<i64>) -> ()
  %rest = transform.structured.match attributes {tag = "matmul_rest"} in %f : (!transform.any_op) -> !transform.any_op // attune: some
  transform.include @matmul_rest_tile failures(propagate) (%rest, %matmul_rows, %matmul_cols) : (!transform.any_op, !transform.param<i64>, !transform.param<i64>) -> ()

  %fold = transform.structured.match attributes {tag = "fold"} in %f : (!transform.any_op) -> !transform.any_op // attune: some
  transform.include @fold_tile failures(propagate) (%fold, %fold_rows) : (!transform.any_op, !transform.param<i64>) -> ()

  %lane_max = transform.structured.match attributes {tag = "lane_max"} in %f : (!transform.any_op) -> !transform.any_op // attune: some
  transform.include @lane_max_tile failures(propagate) (%lane_max) : (!transform.any_op) -> ()

  // One row of one panel at a time: exp and sums, and what changes single scores.
  %weigh = transform.structured.match attributes {tag = "weigh"} in %f : (!transform.any_op) -> !transform.any_op // attune: some
  %weigh_t, %weigh_l:2 = transform.structured.tile_using_for %weigh tile_sizes [1, 1, 0] : (!transform.any_op) -> (!transform.any_op, !transform.any_op, !transform.any_op)
  %change = transform.structured.match attributes {tag = "change"} in %f : (!transform.any_op) -> !transform.any_op // attune: some
  %change_t, %change_l:2 = transform.structured.tile_using_for %change tile_sizes [1, 1, 0] : (!transform.any_op) -> (!transform.any_op, !transform.any_op, !transform.any_op)

  // Passes over whole rows: filling, shrinking, dividing.
  %row = transform.structured.match attributes {tag = "row"} in %f : (!transform.any_op) -> !transform.any_op // attune: some
  %row_t, %row_l = transform.structured.tile_using_for %row tile_sizes [1, 0] : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
  transform.yield
}
