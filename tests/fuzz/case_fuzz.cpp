// Case strings: a case or an Error; a case prints as one that reads as the same.
#include "fuzz.h"

#include "lib/case.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    using namespace attune::tools;
    try {
        const Case c = parse_case({reinterpret_cast<const char *>(data), size});
        const std::string text = to_string(c);
        attune::fuzz::require(parse_case(text) == c, ("a case changes when it is printed: " + text).c_str());
        to_problem(c);
    } catch (const Error &) {
    }
    return 0;
}
