// User functions under test: what each of examples/mods is, once more, in float64.
#pragma once

#include "bed.h"

#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace attune::mods_test {

using contract::Bed;
using tools::Case;

// Parameters whose arrays end at an unreadable page.
class Params {
  public:
    void scalar(const char *name, float x) { add(name, ATTUNE_F32, {}, {x}); }
    void scalar(const char *name, int64_t x) { add(name, ATTUNE_I32, {}, {double(x)}); }
    void floats(const char *name, const std::vector<int64_t> &shape, const std::vector<double> &values) {
        add(name, ATTUNE_F32, shape, values);
    }
    void ints(const char *name, const std::vector<int64_t> &shape, const std::vector<double> &values) {
        add(name, ATTUNE_I32, shape, values);
    }
    const std::vector<attune_param> &list() const { return params_; }

  private:
    void add(const char *name, attune_dtype dtype, const std::vector<int64_t> &shape,
             const std::vector<double> &values);

    std::vector<attune_param> params_;
    std::deque<tools::Buffer> memory_;
};

using Function = std::function<bool(int64_t b, int64_t h, int64_t q, int64_t k, double &score)>;

struct Mod {
    std::string name; // as problems have it
    // Its parameters for a case, and what it does with them.
    std::function<Function(const Case &, Params &)> make;
};

const std::vector<Mod> &mods();
const Mod &mod(const std::string &name);

// Every kernel of these user functions that takes the case (adapted to its sizes and types), against float64. Returns
// how many did it. `edit`: of the numbers, after they are made.
int expect_right(const std::string &name, const std::string &case_text, const std::function<void(Bed &)> &edit = {});

} // namespace attune::mods_test
