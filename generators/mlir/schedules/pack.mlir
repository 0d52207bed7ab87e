// Schedule of the packing of K: dense features are transposed by squares of 16 x 16 (registers only), dense keys copied by
// rows of a panel; the bits are a running maximum of the panel's lanes.
module attributes {transform.with_named_sequence} {
// attune: include tiles.mlir

transform.named_sequence @__transform_main(%m: !transform.any_op {transform.readonly}) {
  %square = transform.tune.knob<"square"> = $square from options = [8, 16] -> !transform.param<i64>
  %transpose = transform.structured.match ops{["linalg.transpose"]} in %m : (!transform.any_op) -> !transform.any_op // attune: some
  %t, %tl:3 = transform.structured.tile_using_for %transpose tile_sizes [1, %square, 16] interchange = [0, 2, 1]
    : (!transform.any_op, !transform.param<i64>) -> (!transform.any_op, !transform.any_op, !transform.any_op, !transform.any_op)
  %copy = transform.structured.match attributes {tag = "copy"} in %m : (!transform.any_op) -> !transform.any_op // attune: some
  %c, %cl:2 = transform.structured.tile_using_for %copy tile_sizes [1, 1, 0] : (!transform.any_op) -> (!transform.any_op, !transform.any_op, !transform.any_op)
  %bits = transform.structured.match attributes {tag = "bits"} in %m : (!transform.any_op) -> !transform.any_op // attune: some
  %b, %bl:2 = transform.structured.tile_using_for %bits tile_sizes [1, 1, 0] : (!transform.any_op) -> (!transform.any_op, !transform.any_op, !transform.any_op)
  transform.include @vectorise failures(propagate) (%m) : (!transform.any_op) -> ()
  transform.yield
}
}
