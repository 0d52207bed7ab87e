// The ONNX operator Attention (opsets 23, 24 and 25) on attune's C API: what its inputs and attributes are as an
// attune_problem, and its outputs in the types that the operator wants. See docs/onnx.md.
//
// Kernels compute in f32 here: f16 and bf16 are widened when read and rounded to nearest even when stored, f64 is
// narrowed. No ONNX library takes part: a node is JSON (which onnx_model.h makes of a .onnx file), tensors
// come from a .safetensors file.
#pragma once

#include "attune/attune.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace attune::tools {

// A dense tensor in memory of its own.
struct OnnxTensor {
    std::string dtype; // as .safetensors names it: F32, F16, BF16, F64, BOOL, I64, …
    std::vector<int64_t> shape;
    std::vector<std::byte> data;

    int64_t elements() const;
};
using OnnxTensors = std::map<std::string, OnnxTensor>;

OnnxTensors read_onnx_tensors(const std::string &path);
void write_onnx_tensors(const std::string &path, const OnnxTensors &tensors);

// "" if `actual` has the type and the shape of `expected` and every element is within atol + rtol * |expected|, where
// NaN equals NaN and an infinity itself; otherwise what is different. bf16: rtol is at least 2^-6, two units in the
// last place, as the onnx package's own runner has it.
std::string onnx_difference(const OnnxTensor &actual, const OnnxTensor &expected, double rtol, double atol);

struct OnnxAttentionNode {
    int64_t opset = 25;
    // Names in the operator's order (Q K V attn_mask past_key past_value nonpad_kv_seqlen; Y present_key present_value
    // qk_matmul_output); "" and what is missing at the end: not given.
    std::vector<std::string> inputs, outputs;
    std::optional<float> scale;
    std::optional<int64_t> q_num_heads, kv_num_heads;
    float softcap = 0;
    bool is_causal = false;
    int64_t left_window = -1, right_window = -1;
    attune_scores_stage scores_stage = ATTUNE_SCORES_RAW; // qk_matmul_output_mode has the same numbers
};

// {"op_type": "Attention", "opset": 24, "inputs": […], "outputs": […], "attributes": {"is_causal": 1, …}}
OnnxAttentionNode parse_onnx_attention(const nlohmann::json &node);

// A node with its inputs, ready to be run by any kernel. All errors are thrown as Error.
class OnnxAttention {
  public:
    OnnxAttention(const OnnxAttentionNode &node, const OnnxTensors &inputs);

    // Only some kernels write scores. Without them the others can be asked for the rest of the outputs.
    bool wants_scores() const { return !scores_name_.empty(); }
    attune_problem problem(bool with_scores) const;

    struct Result {
        std::string kernel;
        OnnxTensors outputs;
    };
    // An empty kernel or strategy leaves the choice to the planner; threads 0: all.
    Result run(const std::string &kernel, const std::string &strategy, int threads, bool with_scores) const;

  private:
    // An array of floats and how it is walked as [B, H, rows, features] (or [B, H, N, M]).
    struct Operand {
        std::vector<float> data;
        int64_t shape[4] = {}, stride[4] = {};
    };
    static Operand widened(const std::string &what, const OnnxTensor &tensor, int64_t heads);
    void set_heads(const OnnxAttentionNode &node, const OnnxTensor &q, const OnnxTensor &k, const OnnxTensor &v);
    void set_mask(const OnnxTensor &mask, bool pad);
    void set_lengths(const OnnxTensor &lengths);

    attune_problem problem_;
    Operand q_, k_, v_, bias_;
    std::vector<uint8_t> mask_;
    int64_t mask_stride_[4] = {};
    std::vector<int64_t> kv_len_, offsets_;
    std::string y_name_, scores_name_;
    std::string y_dtype_; // T1: of Q, Y and the scores
    std::vector<int64_t> y_shape_;
    OnnxTensors present_; // the outputs that need no attention
};

} // namespace attune::tools
