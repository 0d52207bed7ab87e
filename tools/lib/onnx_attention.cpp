// ONNX's Attention on attune's C API; see onnx_attention.h.
//
// The order of what happens to a score is the same in both: scale, soft cap, bias and mask, softmax. What differs is
// how visibility is said: ONNX adds a bias of -inf for everything, attune has causal, window, kv_len and mask as
// predicates. Where they part is noted below.
#include "onnx_attention.h"

#include "error.h"
#include "numbers.h"
#include "runner.h"
#include "runtime/safetensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fmt/ranges.h>
#include <functional>
#include <limits>
#include <numeric>

namespace attune::tools {

namespace {

enum Input { kQ, kK, kV, kMask, kPastKey, kPastValue, kNonpad };
enum Output { kY, kPresentKey, kPresentValue, kScores };
constexpr const char *kInputNames[] = {"Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"};

// Element `index` of any type but the 8-bit floats, exactly, except for 64-bit integers past 2^53.
double number(const OnnxTensor &t, int64_t index) {
    const std::byte *at = t.data.data() + index * int64_t(rt::safetensors_dtype_size(t.dtype));
    const auto as = [at]<typename T>(T value) {
        std::memcpy(&value, at, sizeof value);
        return double(value);
    };
    if (t.dtype == "F32") return as(float());
    if (t.dtype == "F64") return as(double());
    if (t.dtype == "F16") return load_element(t.data.data(), ATTUNE_F16, index);
    if (t.dtype == "BF16") return load_element(t.data.data(), ATTUNE_BF16, index);
    if (t.dtype == "BOOL" || t.dtype == "U8") return as(uint8_t());
    if (t.dtype == "I8") return as(int8_t());
    if (t.dtype == "U16") return as(uint16_t());
    if (t.dtype == "I16") return as(int16_t());
    if (t.dtype == "U32") return as(uint32_t());
    if (t.dtype == "I32") return as(int32_t());
    if (t.dtype == "U64") return as(uint64_t());
    if (t.dtype == "I64") return as(int64_t());
    fail("a tensor's type is {}: expected a number or BOOL", t.dtype);
}

bool is_float(const std::string &dtype) {
    return dtype == "F32" || dtype == "F16" || dtype == "BF16" || dtype == "F64";
}

float narrowed(const std::string &what, const OnnxTensor &t, int64_t index) {
    const double x = number(t, index);
    const float y = float(x);
    if (std::isinf(y) && !std::isinf(x))
        fail("{}: element {} is {}: expected a number within f32, in which attention is computed here", what, index, x);
    return y;
}

OnnxTensor rounded(const std::string &dtype, std::vector<int64_t> shape, const std::vector<float> &data) {
    OnnxTensor t{dtype, std::move(shape), std::vector<std::byte>(data.size() * rt::safetensors_dtype_size(dtype))};
    const int64_t n = int64_t(data.size());
    if (dtype == "F64") {
        for (int64_t i = 0; i < n; ++i) {
            const double x = data[i];
            std::memcpy(t.data.data() + i * 8, &x, 8);
        }
        return t;
    }
    const attune_dtype type = dtype == "F32" ? ATTUNE_F32 : dtype == "F16" ? ATTUNE_F16 : ATTUNE_BF16;
    for (int64_t i = 0; i < n; ++i) store_element(t.data.data(), type, i, data[i]);
    return t;
}

int64_t count(const std::vector<int64_t> &shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>());
}

// K or V as [B, H, S, d], of its type and bits: after `past` (of such a shape) where there is one.
OnnxTensor concatenated(const OnnxTensor *past, const OnnxTensor &t, const int64_t (&shape)[4],
                        const int64_t (&stride)[4]) {
    const auto [B, H, S, d] = shape;
    const int64_t P = past ? past->shape[2] : 0;
    const int64_t element = int64_t(rt::safetensors_dtype_size(t.dtype));
    OnnxTensor all{t.dtype, {B, H, P + S, d}, std::vector<std::byte>(size_t(B * H * (P + S) * d * element))};
    if (all.data.empty()) return all;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < H; ++h) {
            std::byte *to = all.data.data() + (b * H + h) * (P + S) * d * element;
            if (P > 0) std::memcpy(to, past->data.data() + (b * H + h) * P * d * element, size_t(P * d * element));
            for (int64_t s = 0; s < S; ++s)
                std::memcpy(to + (P + s) * d * element,
                            t.data.data() + (b * stride[0] + h * stride[1] + s * stride[2]) * element,
                            size_t(d * element));
        }
    return all;
}

// --- the node --------------------------------------------------------------------------------------------------------

std::vector<std::string> names(const nlohmann::json &node, const char *key, size_t least, size_t most) {
    if (!node.contains(key) || !node[key].is_array())
        fail("node.{} is {}: expected a list of names", key, node.contains(key) ? node[key].dump() : "missing");
    std::vector<std::string> list;
    for (const auto &name : node[key]) {
        if (!name.is_string()) fail("node.{} has {}: expected a name, or \"\" for what is not given", key, name.dump());
        list.push_back(name.get<std::string>());
    }
    if (list.size() < least || list.size() > most)
        fail("node.{} has {} names: expected {} to {}", key, list.size(), least, most);
    list.resize(most);
    return list;
}

int64_t integer(const nlohmann::json &value, const std::string &name, int64_t least, int64_t most) {
    const bool fits = value.is_number_integer() && !(value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX);
    if (!fits || value.get<int64_t>() < least || value.get<int64_t>() > most)
        fail("{} is {}: expected an integer from {} to {}", name, value.dump(), least, most);
    return value.get<int64_t>();
}

float real(const nlohmann::json &value, const std::string &name) {
    const float x = value.is_number() ? value.get<float>() : NAN;
    if (!std::isfinite(x) || x < 0) fail("{} is {}: expected a finite number, 0 or more", name, value.dump());
    return x;
}

const OnnxTensor *input(const OnnxAttentionNode &node, const OnnxTensors &inputs, Input which) {
    const std::string &name = node.inputs.at(which);
    if (name.empty()) return nullptr;
    const auto found = inputs.find(name);
    if (found == inputs.end())
        fail("{} is '{}': no such tensor among the inputs; expected one of: {}", kInputNames[which], name,
             fmt::join(
                 [&] {
                     std::vector<std::string> known;
                     for (const auto &[key, tensor] : inputs) known.push_back(key);
                     return known;
                 }(),
                 ", "));
    return &found->second;
}

void expect_shape(const char *what, const OnnxTensor &t, const std::vector<int64_t> &shape) {
    if (t.shape != shape) fail("{}.shape is {}: expected {}", what, rt::shape_string(t.shape), rt::shape_string(shape));
}

void expect_type(const char *what, const OnnxTensor &t, const std::string &dtype) {
    if (t.dtype != dtype) fail("{}'s type is {}: expected {}", what, t.dtype, dtype);
}

} // namespace

int64_t OnnxTensor::elements() const {
    return count(shape);
}

OnnxTensors read_onnx_tensors(const std::string &path) {
    std::string error;
    const auto file = rt::SafetensorsFile::open(path, error);
    if (!file) fail("{}", error);
    OnnxTensors tensors;
    for (const auto &[name, t] : file->tensors())
        tensors[name] = {t.dtype, t.shape, std::vector<std::byte>(t.data, t.data + t.bytes)};
    return tensors;
}

void write_onnx_tensors(const std::string &path, const OnnxTensors &tensors) {
    std::map<std::string, rt::SafetensorsFile::Tensor> views;
    for (const auto &[name, t] : tensors) views[name] = {t.dtype, t.shape, t.data.data(), t.data.size()};
    std::string error;
    if (!rt::write_safetensors(path, views, error)) fail("{}", error);
}

std::string onnx_difference(const OnnxTensor &actual, const OnnxTensor &expected, double rtol, double atol) {
    if (actual.dtype != expected.dtype) return fmt::format("its type is {}: expected {}", actual.dtype, expected.dtype);
    if (actual.shape != expected.shape)
        return fmt::format("its shape is {}: expected {}", rt::shape_string(actual.shape),
                           rt::shape_string(expected.shape));
    if (expected.dtype == "BF16") rtol = std::max(rtol, 0x1p-6);
    int64_t wrong = 0, first = 0;
    for (int64_t i = 0; i < expected.elements(); ++i) {
        const double a = number(actual, i), e = number(expected, i);
        const bool same = a == e || (std::isnan(a) && std::isnan(e));
        if (same || (std::isfinite(e) && std::abs(a - e) <= atol + rtol * std::abs(e))) continue;
        if (wrong++ == 0) first = i;
    }
    if (wrong == 0) return "";
    return fmt::format("{} of {} elements differ; element {} is {}: expected {} (rtol {}, atol {})", wrong,
                       expected.elements(), first, number(actual, first), number(expected, first), rtol, atol);
}

OnnxAttentionNode parse_onnx_attention(const nlohmann::json &node) {
    if (!node.is_object()) fail("node is {}: expected a JSON object", node.type_name());
    if (node.value("op_type", nlohmann::json()) != "Attention")
        fail("node.op_type is {}: expected \"Attention\"", node.value("op_type", nlohmann::json()).dump());
    OnnxAttentionNode result;
    if (!node.contains("opset")) fail("node.opset is missing: expected 23 or more");
    result.opset = integer(node["opset"], "node.opset", 23, INT32_MAX);
    result.inputs = names(node, "inputs", 3, 7);
    result.outputs = names(node, "outputs", 1, 4);
    if (!node.contains("attributes")) return result;
    if (!node["attributes"].is_object())
        fail("node.attributes is {}: expected a JSON object", node["attributes"].type_name());
    for (const auto &[name, value] : node["attributes"].items()) {
        const std::string what = "attribute " + name;
        if (name == "scale") {
            // ONNX multiplies both Q and K by sqrt(scale): a negative one would be NaN there.
            result.scale = real(value, what);
        } else if (name == "softcap") {
            result.softcap = real(value, what);
        } else if (name == "is_causal") {
            result.is_causal = integer(value, what, 0, 1) != 0;
        } else if (name == "q_num_heads") {
            result.q_num_heads = integer(value, what, 1, INT32_MAX);
        } else if (name == "kv_num_heads") {
            result.kv_num_heads = integer(value, what, 1, INT32_MAX);
        } else if (name == "qk_matmul_output_mode") {
            result.scores_stage = attune_scores_stage(integer(value, what, 0, 3));
        } else if (name == "softmax_precision") {
            // TensorProto's numbers. Whatever it is, the softmax is computed in f32 here.
            const int64_t type = integer(value, what, 1, 16);
            if (type != 1 && type != 10 && type != 11 && type != 16)
                fail("{} is {}: expected 1 (float), 10 (float16), 11 (double) or 16 (bfloat16)", what, type);
        } else if (name == "left_window_size" || name == "right_window_size") {
            if (result.opset < 25) fail("{} with opset {}: expected opset 25 or more", what, result.opset);
            (name[0] == 'l' ? result.left_window : result.right_window) = integer(value, what, -1, INT64_MAX);
        } else {
            fail("{}: unknown; expected an attribute of Attention-{}", what, std::min<int64_t>(result.opset, 25));
        }
    }
    return result;
}

// --- from a node to a problem ----------------------------------------------------------------------------------------

OnnxAttention::Operand OnnxAttention::widened(const std::string &what, const OnnxTensor &t, int64_t heads) {
    Operand x;
    const auto &s = t.shape;
    if (s.size() == 4) {
        std::copy(s.begin(), s.end(), x.shape);
        const int64_t dense[] = {s[1] * s[2] * s[3], s[2] * s[3], s[3], 1};
        std::copy(dense, dense + 4, x.stride);
    } else { // [B, S, H * d]: no transposition, the strides say it
        const int64_t d = s[2] / heads;
        const int64_t shape[] = {s[0], heads, s[1], d}, stride[] = {s[1] * s[2], d, s[2], 1};
        std::copy(shape, shape + 4, x.shape);
        std::copy(stride, stride + 4, x.stride);
    }
    x.data.resize(size_t(t.elements()));
    for (size_t i = 0; i < x.data.size(); ++i) x.data[i] = narrowed(what, t, int64_t(i));
    return x;
}

void OnnxAttention::set_heads(const OnnxAttentionNode &node, const OnnxTensor &q, const OnnxTensor &k,
                              const OnnxTensor &v) {
    const size_t rank = q.shape.size();
    for (const auto &[what, t] : {std::pair{"Q", &q}, {"K", &k}, {"V", &v}}) {
        if (!is_float(t->dtype)) fail("{}'s type is {}: expected F32, F16, BF16 or F64", what, t->dtype);
        if ((rank != 3 && rank != 4) || t->shape.size() != rank)
            fail("{}.shape is {}: expected Q, K and V all of 3 or all of 4 dimensions", what,
                 rt::shape_string(t->shape));
    }
    expect_type("K", k, q.dtype);
    int64_t hq, hkv;
    if (rank == 3) {
        if (!node.q_num_heads || !node.kv_num_heads)
            fail("attribute {} is missing: expected q_num_heads and kv_num_heads, as Q, K and V have 3 dimensions",
                 node.q_num_heads ? "kv_num_heads" : "q_num_heads");
        hq = *node.q_num_heads;
        hkv = *node.kv_num_heads;
        for (const auto &[what, t, heads] : {std::tuple{"Q", &q, hq}, {"K", &k, hkv}, {"V", &v, hkv}})
            if (t->shape[2] % heads != 0)
                fail("{}.shape is {}: expected a last dimension that is a multiple of its {} heads", what,
                     rt::shape_string(t->shape), heads);
    } else {
        hq = q.shape[1];
        hkv = k.shape[1];
        for (const auto &[what, given, heads] :
             {std::tuple{"q_num_heads", node.q_num_heads, hq}, {"kv_num_heads", node.kv_num_heads, hkv}}) {
            if (given && node.opset >= 25)
                fail("attribute {} is {}: expected none, as Q, K and V have 4 dimensions", what, *given);
            if (given && *given != heads)
                fail("attribute {} is {}: expected {}, as the shape has it", what, *given, heads);
        }
    }
    if (hkv == 0 || hq % hkv != 0)
        fail("the heads of Q and K are {} and {}: expected a multiple, and at least one of K", hq, hkv);
    problem_.Hq = hq;
    problem_.Hkv = hkv;
}

OnnxAttention::OnnxAttention(const OnnxAttentionNode &node, const OnnxTensors &inputs) {
    attune_problem_init(&problem_);
    for (Input required : {kQ, kK, kV})
        if (node.inputs.at(required).empty())
            fail("{} is not given: expected the name of a tensor", kInputNames[required]);
    const OnnxTensor &q = *input(node, inputs, kQ), &k = *input(node, inputs, kK), &v = *input(node, inputs, kV);
    const OnnxTensor *const past_key = input(node, inputs, kPastKey), *const past_value =
                                                                          input(node, inputs, kPastValue);
    const OnnxTensor *const mask = input(node, inputs, kMask), *const nonpad = input(node, inputs, kNonpad);
    set_heads(node, q, k, v);

    q_ = widened("Q", q, problem_.Hq);
    k_ = widened("K", k, problem_.Hkv);
    v_ = widened("V", v, problem_.Hkv);
    const int64_t B = q_.shape[0], S = k_.shape[2];
    for (const auto &[what, x] : {std::pair{"K", &k_}, {"V", &v_}})
        if (x->shape[0] != B || x->shape[1] != problem_.Hkv || x->shape[2] != S)
            fail("{} is [batch {}, heads {}, keys {}]: expected [batch {}, heads {}, keys {}]", what, x->shape[0],
                 x->shape[1], x->shape[2], B, problem_.Hkv, S);
    if (k_.shape[3] != q_.shape[3]) fail("K's head size is {}: expected {}, that of Q", k_.shape[3], q_.shape[3]);

    int64_t past = 0;
    if ((past_key == nullptr) != (past_value == nullptr))
        fail("{} is not given: expected both past_key and past_value, or neither",
             past_key ? "past_value" : "past_key");
    if (past_key) {
        if (nonpad) fail("nonpad_kv_seqlen is given: expected none, as past_key is given");
        if (past_key->shape.size() != 4)
            fail("past_key.shape is {}: expected 4 dimensions", rt::shape_string(past_key->shape));
        past = past_key->shape[2];
        expect_shape("past_key", *past_key, {B, problem_.Hkv, past, k_.shape[3]});
        expect_shape("past_value", *past_value, {B, problem_.Hkv, past, v_.shape[3]});
        expect_type("past_key", *past_key, k.dtype);
        expect_type("past_value", *past_value, v.dtype);
    }
    // attune keeps no cache: the concatenation is done here, and is the operator's output as it stands.
    for (const auto &[output, what, old, t, x] :
         {std::tuple{kPresentKey, "K", past_key, &k, &k_}, {kPresentValue, "V", past_value, &v, &v_}}) {
        const std::string &name = node.outputs.at(output);
        if (!old && name.empty()) continue;
        OnnxTensor all = concatenated(old, *t, x->shape, x->stride);
        if (old) *x = widened(what, all, problem_.Hkv);
        if (!name.empty()) present_[name] = std::move(all);
    }

    problem_.B = B;
    problem_.N = q_.shape[2];
    problem_.M = k_.shape[2];
    problem_.dk = q_.shape[3];
    problem_.dv = v_.shape[3];
    problem_.scores_stage = node.scores_stage;
    if (node.scale) {
        problem_.flags |= ATTUNE_SCALE;
        problem_.scale = *node.scale;
    }
    if (node.softcap > 0) {
        problem_.flags |= ATTUNE_SOFTCAP;
        problem_.softcap = node.softcap;
    }
    if (node.is_causal) problem_.flags |= ATTUNE_CAUSAL;
    problem_.window_left = node.left_window;
    problem_.window_right = node.right_window;
    problem_.offset = past;
    if (nonpad) {
        if (node.opset < 24) fail("nonpad_kv_seqlen with opset {}: expected opset 24 or more", node.opset);
        for (const auto &[what, output] : {std::pair{"present_key", kPresentKey}, {"present_value", kPresentValue}})
            if (!node.outputs.at(output).empty())
                fail("output {} is '{}': expected none, as nonpad_kv_seqlen is given", what, node.outputs[output]);
        set_lengths(*nonpad);
    }
    // From opset 24 on a mask may be shorter than the keys; in 23 a last dimension of 1 broadcasts, like the others.
    if (mask) set_mask(*mask, node.opset >= 24);

    y_name_ = node.outputs.at(kY);
    if (y_name_.empty()) fail("output Y is not given: expected a name");
    scores_name_ = node.outputs.at(kScores);
    y_dtype_ = q.dtype;
    if (q.shape.size() == 4)
        y_shape_ = {B, problem_.Hq, problem_.N, problem_.dv};
    else
        y_shape_ = {B, problem_.N, problem_.Hq * problem_.dv};
}

void OnnxAttention::set_lengths(const OnnxTensor &lengths) {
    expect_type("nonpad_kv_seqlen", lengths, "I64");
    expect_shape("nonpad_kv_seqlen", lengths, {problem_.B});
    problem_.flags |= ATTUNE_KV_LEN | ATTUNE_OFFSETS;
    kv_len_.resize(size_t(problem_.B));
    if (problem_.B > 0) std::memcpy(kv_len_.data(), lengths.data.data(), kv_len_.size() * 8);
    for (int64_t b = 0; b < problem_.B; ++b) {
        if (kv_len_[b] < 0 || kv_len_[b] > problem_.M)
            fail("nonpad_kv_seqlen[{}] is {}: expected 0 to {}, the number of keys", b, kv_len_[b], problem_.M);
        // The last row stands at the last key that is no padding. Negative where there are more rows than keys: the
        // first rows then see nothing.
        offsets_.push_back(kv_len_[b] - problem_.N);
    }
}

void OnnxAttention::set_mask(const OnnxTensor &mask, bool pad) {
    const int64_t full[] = {problem_.B, problem_.Hq, problem_.N, problem_.M};
    const size_t rank = mask.shape.size();
    const auto wrong = [&](const std::string &expected) {
        fail("attn_mask.shape is {}: expected {}", rt::shape_string(mask.shape), expected);
    };
    if (rank < 1 || rank > 4) wrong("1 to 4 dimensions");
    int64_t shape[] = {1, 1, 1, 1};
    std::copy(mask.shape.begin(), mask.shape.end(), shape + 4 - rank);
    for (int i = 0; i < 3; ++i)
        if (shape[i] != 1 && shape[i] != full[i])
            wrong(fmt::format("what broadcasts to {}", rt::shape_string({full, full + 4})));
    const int64_t given = shape[3];
    if (pad ? given > problem_.M : given != 1 && given != problem_.M)
        wrong(fmt::format("a last dimension of {}{}", pad ? "at most " : "1 or ", problem_.M));
    if (pad) shape[3] = problem_.M;

    int64_t stride[4], next = 1;
    for (int i = 3; i >= 0; --i) {
        stride[i] = shape[i] == 1 ? 0 : next;
        next *= shape[i];
    }
    const int64_t rows = shape[0] * shape[1] * shape[2];
    if (mask.dtype == "BOOL") {
        problem_.flags |= ATTUNE_MASK;
        mask_.assign(size_t(rows * shape[3]), 0);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t j = 0; j < given; ++j) mask_[r * shape[3] + j] = number(mask, r * given + j) != 0;
        std::copy(stride, stride + 4, mask_stride_);
        return;
    }
    problem_.flags |= ATTUNE_BIAS;
    bias_.data.assign(size_t(rows * shape[3]), -std::numeric_limits<float>::infinity());
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < given; ++j) bias_.data[r * shape[3] + j] = narrowed("attn_mask", mask, r * given + j);
    std::copy(stride, stride + 4, bias_.stride);
}

// --- running it ------------------------------------------------------------------------------------------------------

attune_problem OnnxAttention::problem(bool with_scores) const {
    attune_problem p = problem_;
    if (with_scores && wants_scores()) p.flags |= ATTUNE_SCORES;
    return p;
}

OnnxAttention::Result OnnxAttention::run(const std::string &kernel, const std::string &strategy, int threads,
                                         bool with_scores) const {
    const attune_problem p = problem(with_scores);
    std::string why;
    const Plan plan = make_plan(p, kernel, strategy, threads, why);
    if (!plan) fail("{}", why);

    // Filled with NaN, so that an element that a kernel leaves out is seen.
    std::vector<float> y(size_t(count(y_shape_)), NAN);
    std::vector<float> scores(p.flags & ATTUNE_SCORES ? size_t(p.B * p.Hq * p.N * p.M) : 0, NAN);
    const auto view = [](const void *data, attune_dtype dtype, const int64_t(&shape)[4], const int64_t(&stride)[4]) {
        attune_tensor t{};
        t.data = const_cast<void *>(data); // inputs are only read
        t.dtype = dtype;
        t.device = ATTUNE_CPU;
        std::copy(shape, shape + 4, t.shape);
        std::copy(stride, stride + 4, t.stride);
        return t;
    };
    const int64_t nm[4] = {p.B, p.Hq, p.N, p.M}, y_shape[4] = {p.B, p.Hq, p.N, p.dv};
    const int64_t scores_stride[4] = {p.Hq * p.N * p.M, p.N * p.M, p.M, 1};
    const int64_t y4[4] = {p.Hq * p.N * p.dv, p.N * p.dv, p.dv, 1}, y3[4] = {p.N * p.Hq * p.dv, p.dv, p.Hq * p.dv, 1};
    const attune_tensor mask = view(mask_.data(), ATTUNE_U8, nm, mask_stride_);
    const attune_tensor bias = view(bias_.data.data(), ATTUNE_F32, nm, bias_.stride);
    const attune_tensor scores_view = view(scores.data(), ATTUNE_F32, nm, scores_stride);
    attune_tensors t;
    attune_tensors_init(&t);
    t.q = view(q_.data.data(), ATTUNE_F32, q_.shape, q_.stride);
    t.k = view(k_.data.data(), ATTUNE_F32, k_.shape, k_.stride);
    t.v = view(v_.data.data(), ATTUNE_F32, v_.shape, v_.stride);
    t.o = view(y.data(), ATTUNE_F32, y_shape, y_shape_.size() == 4 ? y4 : y3);
    if (p.flags & ATTUNE_MASK) t.mask = &mask;
    if (p.flags & ATTUNE_BIAS) t.bias = &bias;
    if (p.flags & ATTUNE_SCORES) t.scores = &scores_view;
    if (p.flags & ATTUNE_KV_LEN) t.kv_len = kv_len_.data();
    if (p.flags & ATTUNE_OFFSETS) t.offsets = offsets_.data();

    std::vector<std::byte> workspace(attune_plan_workspace(plan.get()));
    const attune_status status = attune_run(plan.get(), &t, workspace.data(), workspace.size());
    if (status != ATTUNE_OK) fail("{}: {}", attune_status_string(status), attune_last_error());

    Result result{attune_plan_kernel(plan.get()), present_};
    result.outputs[y_name_] = rounded(y_dtype_, y_shape_, y);
    if (p.flags & ATTUNE_SCORES) result.outputs[scores_name_] = rounded(y_dtype_, {nm, nm + 4}, scores);
    return result;
}

} // namespace attune::tools
