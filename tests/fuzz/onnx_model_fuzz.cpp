// .onnx files: nodes or an Error.
#include "fuzz.h"

#include "lib/onnx_model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    using namespace attune::tools;
    try {
        for (const nlohmann::json &node : onnx_attention_nodes({reinterpret_cast<const char *>(data), size}))
            attune::fuzz::require(node.at("op_type") == "Attention", "a node of another operator");
    } catch (const Error &) {
    }
    return 0;
}
