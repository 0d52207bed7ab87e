// The process in which attune tune runs candidates: loads plug-ins, checks kernels, times them. A candidate that
// crashes or hangs takes this process with it and nothing else.
//
//   {"op": "prepare", "case", "seed", "threads", "guarded"}   arrays of a case and their reference; several may be held
//   {"op": "plan", "case", "threads"}                         {"kernel"}: the planner's choice, or {"cannot": why}
//   {"op": "load", "library"}                                 {"ok": true} or {"cannot": why}
//   {"op": "check", "case", "kernel"}                         {"ok", "why", "error", "bound"}: against float64
//   {"op": "check_random", "kernel", "count", "seed"}         {"ok", "why", "count"}: on small random problems
//   {"op": "time", "case", "kernels", "rounds", "limit"}      {"times": [{"samples": [s, …]} or {"slow": s} or
//   {"failed"}, …]}
#pragma once

namespace attune::tools {

int serve_tuning(); // until the other side closes; returns the exit status

} // namespace attune::tools
