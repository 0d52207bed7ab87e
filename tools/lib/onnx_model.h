// Reads the Attention nodes out of a .onnx file. The format is a protocol buffer (onnx.proto); only the few fields that
// describe nodes are looked at, so that neither ONNX's library nor protobuf is needed.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace attune::tools {

// The nodes of the model's graph whose operator is Attention, in the form that parse_onnx_attention takes, each with a
// "name" (that of its first output, where it has none). Subgraphs and functions are not searched. Throws Error where
// the bytes are no such model.
std::vector<nlohmann::json> onnx_attention_nodes(std::string_view model);

} // namespace attune::tools
