// The parts of tools/lib/onnx_attention.h that the conformance suite does not reach: errors, and that a wrong output is
// seen as one. The operator's values are tested by tests/conformance/onnx.
#include "lib/onnx_attention.h"

#include "lib/error.h"
#include "lib/onnx_model.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <memory>

namespace attune::tools {
namespace {

template <typename T> OnnxTensor tensor(const std::string &dtype, std::vector<int64_t> shape, std::vector<T> values) {
    OnnxTensor t{dtype, std::move(shape), std::vector<std::byte>(values.size() * sizeof(T))};
    if (!values.empty()) std::memcpy(t.data.data(), values.data(), t.data.size());
    return t;
}

OnnxTensor f32(std::vector<int64_t> shape, std::vector<float> values) {
    return tensor("F32", std::move(shape), std::move(values));
}

float value(const OnnxTensor &t, int64_t i) {
    float x;
    std::memcpy(&x, t.data.data() + i * 4, 4);
    return x;
}

nlohmann::json node() {
    return {{"op_type", "Attention"}, {"opset", 25}, {"inputs", {"Q", "K", "V"}}, {"outputs", {"Y"}}};
}

// q = (1, 0), keys (1, 0), (0, 1), (1, 1), values 10, 20, 40.
OnnxTensors inputs() {
    return {{"Q", f32({1, 1, 1, 2}, {1, 0})},
            {"K", f32({1, 1, 3, 2}, {1, 0, 0, 1, 1, 1})},
            {"V", f32({1, 1, 3, 1}, {10, 20, 40})}};
}

OnnxTensors run(const nlohmann::json &node, const OnnxTensors &tensors) {
    const OnnxAttention attention(parse_onnx_attention(node), tensors);
    return attention.run("", "", 1, true).outputs;
}

std::string error_of(const nlohmann::json &node, const OnnxTensors &tensors) {
    try {
        run(node, tensors);
    } catch (const Error &e) {
        return e.what();
    }
    return "no error";
}

TEST(OnnxAttention, HandChecked) {
    const float y = value(run(node(), inputs()).at("Y"), 0), light = std::exp(-1 / std::sqrt(2.0f));
    EXPECT_NEAR(y, (10 + 20 * light + 40) / (2 + light), 1e-4);
    EXPECT_NEAR(y, 24.0, 0.05);
}

TEST(OnnxAttention, PastIsAheadAndMovesTheDiagonal) {
    auto n = node();
    n["inputs"] = {"Q", "K", "V", "", "PK", "PV"};
    n["outputs"] = {"Y", "K2", "V2", "S"};
    n["attributes"] = {{"is_causal", 1}, {"qk_matmul_output_mode", 2}, {"scale", 1.0}};
    auto t = inputs();
    t["PK"] = f32({1, 1, 1, 2}, {5, 6});
    t["PV"] = f32({1, 1, 1, 1}, {7});
    const OnnxTensors out = run(n, t);
    EXPECT_EQ(onnx_difference(out.at("K2"), f32({1, 1, 4, 2}, {5, 6, 1, 0, 0, 1, 1, 1}), 0, 0), "");
    EXPECT_EQ(onnx_difference(out.at("V2"), f32({1, 1, 4, 1}, {7, 10, 20, 40}), 0, 0), "");
    // Row 0 stands at key 1.
    EXPECT_EQ(onnx_difference(out.at("S"), f32({1, 1, 1, 4}, {5, 1, -INFINITY, -INFINITY}), 1e-6, 0), "");
}

TEST(OnnxAttention, MaskOfOneColumnBroadcastsIn23AndIsPaddedLater) {
    auto n = node();
    n["inputs"] = {"Q", "K", "V", "M"};
    auto t = inputs();
    t["M"] = tensor<uint8_t>("BOOL", {1}, {1});
    EXPECT_EQ(value(run(n, t).at("Y"), 0), 10.0f);
    n["opset"] = 23;
    EXPECT_NEAR(value(run(n, t).at("Y"), 0), 24.0, 0.05);
}

TEST(OnnxAttention, MaskOfIntegersIsAdded) {
    auto n = node();
    n["inputs"] = {"Q", "K", "V", "M"};
    auto t = inputs();
    t["M"] = tensor<int32_t>("I32", {3}, {0, 100, 0});
    EXPECT_NEAR(value(run(n, t).at("Y"), 0), 20.0, 1e-4);
}

TEST(OnnxAttention, SixteenBitsAreRoundedToNearestEven) {
    auto t = inputs();
    t["Q"] = tensor<uint16_t>("BF16", {1, 1, 1, 1}, {0});
    t["K"] = tensor<uint16_t>("BF16", {1, 1, 2, 1}, {0, 0});
    // Their mean, 1 + 2^-8, lies between two bf16 numbers; the even one is 1.
    t["V"] = tensor<uint16_t>("BF16", {1, 1, 2, 1}, {0x3f80, 0x3f81});
    EXPECT_EQ(onnx_difference(run(node(), t).at("Y"), tensor<uint16_t>("BF16", {1, 1, 1, 1}, {0x3f80}), 0, 0), "");
    uint16_t bits;
    std::memcpy(&bits, run(node(), t).at("Y").data.data(), 2);
    EXPECT_EQ(bits, 0x3f80);
}

TEST(OnnxAttention, ErrorsNameTheArgument) {
    using Change = std::function<void(nlohmann::json &, OnnxTensors &)>;
    const std::vector<std::pair<std::string, Change>> cases = {
        {"node.op_type is \"Gemm\": expected \"Attention\"", [](auto &n, auto &) { n["op_type"] = "Gemm"; }},
        {"node.opset is 22: expected an integer from 23", [](auto &n, auto &) { n["opset"] = 22; }},
        {"node.inputs has 2 names",
         [](auto &n, auto &) {
             n["inputs"] = {"Q", "K"};
         }},
        {"V is 'W': no such tensor",
         [](auto &n, auto &) {
             n["inputs"] = {"Q", "K", "W"};
         }},
        {"attribute scale is -1.0",
         [](auto &n, auto &) {
             n["attributes"] = {{"scale", -1.0}};
         }},
        {"attribute is_causal is 2",
         [](auto &n, auto &) {
             n["attributes"] = {{"is_causal", 2}};
         }},
        {"attribute alpha: unknown",
         [](auto &n, auto &) {
             n["attributes"] = {{"alpha", 2}};
         }},
        {"attribute softmax_precision is 7",
         [](auto &n, auto &) {
             n["attributes"] = {{"softmax_precision", 7}};
         }},
        {"attribute q_num_heads is 1: expected none",
         [](auto &n, auto &) {
             n["attributes"] = {{"q_num_heads", 1}};
         }},
        {"attribute left_window_size with opset 24",
         [](auto &n, auto &) {
             n["opset"] = 24;
             n["attributes"] = {{"left_window_size", 1}};
         }},
        {"attribute q_num_heads is missing",
         [](auto &, auto &t) {
             for (auto &[name, x] : t) x.shape.erase(x.shape.begin());
         }},
        {"K.shape is [3, 2]: expected Q, K and V all of 3",
         [](auto &, auto &t) {
             t["K"].shape = {3, 2};
         }},
        {"K's head size is 3: expected 2",
         [](auto &, auto &t) {
             t["K"] = f32({1, 1, 3, 3}, std::vector<float>(9));
         }},
        {"K's type is F16: expected F32",
         [](auto &, auto &t) {
             t["K"] = tensor<uint16_t>("F16", {1, 1, 3, 2}, std::vector<uint16_t>(6));
         }},
        {"Q's type is I32", [](auto &, auto &t) { t["Q"].dtype = "I32"; }},
        {"the heads of Q and K are 1 and 2",
         [](auto &, auto &t) {
             t["K"] = f32({1, 2, 3, 2}, std::vector<float>(12));
         }},
        {"V is [batch 1, heads 1, keys 2]",
         [](auto &, auto &t) {
             t["V"] = f32({1, 1, 2, 1}, {1, 2});
         }},
        {"past_value is not given",
         [](auto &n, auto &t) {
             n["inputs"] = {"Q", "K", "V", "", "P"};
             t["P"] = f32({1, 1, 1, 2}, {1, 2});
         }},
        {"attn_mask.shape is [2, 3]: expected what broadcasts to [1, 1, 1, 3]",
         [](auto &n, auto &t) {
             n["inputs"] = {"Q", "K", "V", "M"};
             t["M"] = f32({2, 3}, std::vector<float>(6));
         }},
        {"attn_mask.shape is [4]: expected a last dimension of at most 3",
         [](auto &n, auto &t) {
             n["inputs"] = {"Q", "K", "V", "M"};
             t["M"] = f32({4}, std::vector<float>(4));
         }},
        {"attn_mask.shape is [2]: expected a last dimension of 1 or 3",
         [](auto &n, auto &t) {
             n["opset"] = 23;
             n["inputs"] = {"Q", "K", "V", "M"};
             t["M"] = f32({2}, std::vector<float>(2));
         }},
        {"nonpad_kv_seqlen[0] is 4: expected 0 to 3",
         [](auto &n, auto &t) {
             n["inputs"] = {"Q", "K", "V", "", "", "", "L"};
             t["L"] = tensor<int64_t>("I64", {1}, {4});
         }},
        {"output present_key is 'P': expected none",
         [](auto &n, auto &t) {
             n["inputs"] = {"Q", "K", "V", "", "", "", "L"};
             n["outputs"] = {"Y", "P"};
             t["L"] = tensor<int64_t>("I64", {1}, {3});
         }},
        {"Q: element 1 is 1e+300: expected a number within f32",
         [](auto &, auto &t) {
             t["Q"] = tensor<double>("F64", {1, 1, 1, 2}, {0, 1e300});
             t["K"] = tensor<double>("F64", {1, 1, 3, 2}, std::vector<double>(6));
         }},
    };
    for (const auto &[message, change] : cases) {
        auto n = node();
        auto t = inputs();
        change(n, t);
        const std::string error = error_of(n, t);
        EXPECT_TRUE(error.find(message) != std::string::npos) << "expected: " << message << "\ngot: " << error;
    }
}

TEST(OnnxDifference, SeesWhatIsDifferent) {
    const OnnxTensor expected = f32({3}, {1, -INFINITY, NAN});
    EXPECT_EQ(onnx_difference(expected, expected, 0, 0), "");
    EXPECT_EQ(onnx_difference(f32({3}, {1.0009f, -INFINITY, NAN}), expected, 1e-3, 0), "");
    for (const OnnxTensor &wrong : {f32({3}, {1.0011f, -INFINITY, NAN}), f32({3}, {1, -3e38f, NAN}),
                                    f32({3}, {1, INFINITY, NAN}), f32({3}, {1, -INFINITY, 0}), f32({3}, {NAN, 0, 0}),
                                    f32({1, 3}, {1, -INFINITY, NAN}), tensor<int32_t>("I32", {3}, {1, 0, 0})})
        EXPECT_NE(onnx_difference(wrong, expected, 1e-3, 1e-7), "");
    // Two units in the last place of bf16.
    const auto bf16 = [](uint16_t x) { return tensor<uint16_t>("BF16", {1}, {x}); };
    EXPECT_EQ(onnx_difference(bf16(0x3f82), bf16(0x3f80), 1e-3, 0), "");
    EXPECT_NE(onnx_difference(bf16(0x3f83), bf16(0x3f80), 1e-3, 0), "");
}

std::string field(int number, const std::string &bytes) {
    return std::string{char(number << 3 | 2), char(bytes.size())} + bytes;
}
std::string varint(int number, char value) {
    return {char(number << 3), value};
}

// A model of two nodes: Relu, and Attention without a name, is_causal = 1, softcap = 2.
std::string model() {
    const std::string causal = field(1, "is_causal") + varint(3, 1) + std::string("\xa0\x01\x02", 3);
    const std::string cap = field(1, "softcap") + std::string("\x15\0\0\0\x40", 5) + std::string("\xa0\x01\x01", 3);
    const std::string relu = field(1, "X") + field(2, "Q") + field(4, "Relu");
    const std::string attention = field(1, "Q") + field(1, "K") + field(1, "V") + field(2, "Y") +
                                  field(4, "Attention") + field(5, causal) + field(5, cap);
    return varint(1, 10) + field(7, field(1, relu) + field(1, attention) + field(2, "graph")) +
           field(8, field(1, "ai.onnx.ml") + varint(2, 5)) + field(8, field(1, "") + varint(2, 24));
}

TEST(OnnxModel, FindsTheAttentionNodes) {
    const auto nodes = onnx_attention_nodes(model());
    ASSERT_EQ(nodes.size(), 1u);
    EXPECT_EQ(nodes[0], nlohmann::json::parse(R"({"name": "Y", "op_type": "Attention", "opset": 24,
        "inputs": ["Q", "K", "V"], "outputs": ["Y"], "attributes": {"is_causal": 1, "softcap": 2.0}})"));
}

TEST(OnnxModel, BrokenFilesAreErrors) {
    EXPECT_THROW(onnx_attention_nodes(""), Error);
    EXPECT_THROW(onnx_attention_nodes("no protocol buffer"), Error);
    EXPECT_THROW(onnx_attention_nodes(std::string(20, '\xff')), Error);
    const std::string whole = model();
    // Cut anywhere, it is an error: the opset, which is needed, is at the end.
    for (size_t n = 0; n < whole.size(); ++n) {
        const auto copy = std::make_unique<char[]>(n); // of that size, for AddressSanitizer
        std::memcpy(copy.get(), whole.data(), n);
        EXPECT_THROW(onnx_attention_nodes({copy.get(), n}), Error) << n;
    }
    // With any byte changed it is an error or a model.
    for (size_t i = 0; i < whole.size(); ++i)
        for (int byte = 0; byte < 256; ++byte) {
            std::string changed = whole;
            changed[i] = char(byte);
            try {
                for (const auto &n : onnx_attention_nodes(changed)) parse_onnx_attention(n);
            } catch (const Error &) {
            }
        }
}

} // namespace
} // namespace attune::tools
