// Wrong arguments: every mistake is a message that names the argument, its value and what was expected, through the C++
// layer as an exception, and y is not touched.
#include "attune/attune.hpp"
#include "runtime/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>

namespace {

using testing::HasSubstr;

// The Error that `f` throws, or a failure.
attune::Error error_of(const std::function<void()> &f) {
    try {
        f();
    } catch (const attune::Error &e) {
        return e;
    }
    ADD_FAILURE() << "no attune::Error was thrown";
    return {ATTUNE_OK, ""};
}

void expect_error(const std::function<void()> &f, attune_status status, const std::string &message) {
    const attune::Error error = error_of(f);
    EXPECT_EQ(error.status(), status) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(message));
}

constexpr auto kInvalid = ATTUNE_INVALID_ARGUMENT;

// --- views, workspaces, plans
// --------------------------------------------------------------------------------------------

TEST(View, HelpersGiveShapeAndStrides) {
    const std::vector<float> read(2 * 3 * 4 * 5);
    std::vector<float> written(2 * 3 * 4 * 5);
    using Four = std::array<int64_t, 4>;
    const auto bhsd = attune::bhsd(read, 2, 3, 4, 5);
    EXPECT_EQ(bhsd.shape, (Four{2, 3, 4, 5}));
    EXPECT_EQ(bhsd.stride, (Four{60, 20, 5, 1}));
    EXPECT_EQ(bhsd.data, read.data());
    const auto bshd = attune::bshd(written, 2, 4, 3, 5);
    EXPECT_EQ(bshd.shape, (Four{2, 3, 4, 5}));
    EXPECT_EQ(bshd.stride, (Four{60, 5, 15, 1}));
    const auto col = attune::col(read, 2, 3, 4, 5);
    EXPECT_EQ(col.shape, (Four{2, 3, 4, 5}));
    EXPECT_EQ(col.stride, (Four{60, 20, 1, 4}));
    const auto rows = attune::rows(read, 6, 4, 5);
    EXPECT_EQ(rows.shape, (Four{6, 1, 4, 5}));
    EXPECT_EQ(rows.stride, (Four{20, 0, 5, 1}));
    const auto per_key = attune::per_key(read, 2, 3, 7, 60);
    EXPECT_EQ(per_key.shape, (Four{2, 3, 7, 60}));
    EXPECT_EQ(per_key.stride, (Four{60, 0, 0, 1}));
    static_assert(std::is_same_v<decltype(attune::bhsd(read, 1, 1, 1, 1)), attune::ConstTensorView>);
    static_assert(std::is_same_v<decltype(attune::bhsd(written, 1, 1, 1, 1)), attune::TensorView>);
    static_assert(std::is_same_v<decltype(attune::bhsd(written.data(), 1, 1, 1, 1)), attune::TensorView>);
    const std::array<uint8_t, 4> mask{};
    EXPECT_EQ(attune::per_key(mask, 1, 1, 1, 4).dtype, attune::Dtype::u8);
    const std::array<attune::Bf16, 4> bf16{};
    EXPECT_EQ(attune::bhsd(bf16, 1, 1, 1, 4).dtype, attune::Dtype::bf16);
}

TEST(View, SizesOfRangesAreChecked) {
    const std::vector<float> memory(24);
    EXPECT_NO_THROW(attune::bhsd(memory, 1, 2, 3, 4));
    EXPECT_NO_THROW(attune::bhsd(memory, 0, 200, 3, 4));
    expect_error([&] { attune::bhsd(memory, 1, 2, 3, 5); }, kInvalid,
                 "the memory holds 24 elements, but shape [1, 2, 3, 5] with stride [30, 15, 5, 1] reaches element 29");
    expect_error([&] { attune::rows(memory, 1, -3, 5); }, kInvalid,
                 "shape is [1, 1, -3, 5]: expected extents of 0 or more");
    expect_error(
        [&] {
            attune::strided(memory, {1, 1, 2, 4}, {0, 0, -4, 1});
        },
        kInvalid, "stride is [0, 0, -4, 1]: expected 0 or more");
    expect_error(
        [&] {
            attune::strided(memory, {3, 1, 2, 4}, {INT64_MAX, 0, 4, 1});
        },
        kInvalid, "the memory holds 24 elements");
    EXPECT_NO_THROW(attune::strided(memory, {1, 1, 100, 4}, {-7, -7, 0, 1})); // strides of extent 1 are ignored
}

TEST(Workspace, GrowsAndIsAligned) {
    attune::Workspace workspace(100);
    EXPECT_GE(workspace.size(), 100u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace.data()) % 64, 0u);
    workspace.reserve(5000);
    EXPECT_GE(workspace.size(), 5000u);
    const auto *before = workspace.data();
    workspace.reserve(10);
    EXPECT_EQ(workspace.data(), before);
#ifndef __SANITIZE_ADDRESS__ // which ends the program instead
    expect_error([&] { workspace.reserve(size_t(1) << 62); }, ATTUNE_OUT_OF_MEMORY,
                 "workspace of 4611686018427387904 bytes");
#endif
}

TEST(Plan, WrongProblemsAreNamed) {
    expect_error([] { attune::plan({.N = 4, .dk = 0}); }, kInvalid, "dk is 0");
    expect_error([] { attune::plan({.Hq = 8, .Hkv = 3, .N = 4, .dk = 8}); }, kInvalid, "3");
    expect_error([] { attune::plan({.N = -1, .dk = 8}); }, kInvalid, "N is -1");
    expect_error([] { attune::plan({.N = 4, .dk = 8, .softcap = -1.0f}); }, kInvalid, "softcap is -1");
    expect_error([] { attune::plan({.N = 4, .dk = 8}, {.strategy = "no_such"}); }, kInvalid, "no_such");
    expect_error([] { attune::plan({.N = 4, .dk = 8}, {.kernel = "no_such"}); }, kInvalid, "no_such");
    attune::Status status = ATTUNE_OK;
    EXPECT_FALSE(attune::Plan::try_make({.N = 4, .dk = 0}, {}, &status));
    EXPECT_EQ(status, kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("dk is 0"));
}

struct Attention {
    std::vector<float> q = std::vector<float>(2 * 4 * 8), k = std::vector<float>(2 * 6 * 8),
                       o = std::vector<float>(2 * 4 * 8, -77);
    attune::Tensors tensors() {
        return {.q = attune::bhsd(q, 1, 2, 4, 8),
                .k = attune::bhsd(k, 1, 2, 6, 8),
                .v = attune::bhsd(k, 1, 2, 6, 8),
                .o = attune::bhsd(o, 1, 2, 4, 8)};
    }
    bool untouched() const {
        return std::all_of(o.begin(), o.end(), [](float x) { return x == -77; });
    }
};

TEST(Run, WrongTensorsAreNamedAndNothingIsWritten) {
    Attention a;
    attune::Workspace workspace;
    const auto plan = attune::plan({.Hq = 2, .N = 4, .M = 6, .dk = 8});
    auto fails = [&](const std::function<void(attune::Tensors &)> &change, const std::string &message) {
        auto tensors = a.tensors();
        change(tensors);
        expect_error([&] { attune::run(plan, tensors, workspace); }, kInvalid, message);
        EXPECT_TRUE(a.untouched());
    };
    fails([&](auto &t) { t.q = attune::bhsd(a.q, 1, 2, 8, 4); }, "q.shape");
    fails([&](auto &t) { t.v = attune::bhsd(a.k, 1, 2, 5, 8); }, "v.shape");
    fails([&](auto &t) { t.k = {}; }, "k.shape");
    fails([&](auto &t) { t.k.data = nullptr; }, "k.data is null");
    fails([&](auto &t) { t.q.dtype = attune::Dtype::f16; }, "q.dtype is f16");
    fails([&](auto &t) { t.extras.lse = attune::bhsd(a.o, 1, 2, 5, 1); }, "lse.shape");
    fails([&](auto &t) { t.extras.mask = attune::per_key(a.q, 1, 2, 4, 6); }, "mask is given");
    auto tensors = a.tensors();
    if (plan.workspace_size() > 0) {
        std::vector<std::byte> small(plan.workspace_size() - 1);
        expect_error([&] { attune::run(plan, tensors, std::span(small)); }, kInvalid, "workspace_size is");
        EXPECT_EQ(attune::try_run(plan, tensors, std::span(small)), kInvalid);
    }
    EXPECT_TRUE(a.untouched());
    const auto with_lengths = attune::plan({.Hq = 2, .N = 4, .M = 6, .dk = 8, .kv_len = true});
    const std::vector<int64_t> two = {6, 6}, long_one = {7};
    tensors.extras.kv_len = two;
    expect_error([&] { attune::run(with_lengths, tensors, workspace); }, kInvalid,
                 "kv_len has 2 entries: expected B = 1");
    tensors.extras.kv_len = long_one;
    expect_error([&] { attune::run(with_lengths, tensors, workspace); }, kInvalid, "kv_len[0] is 7");
    tensors.extras.kv_len = {};
    expect_error([&] { attune::run(with_lengths, tensors, workspace); }, kInvalid, "kv_len is null");
    EXPECT_TRUE(a.untouched());
    attune::run(plan, a.tensors(), workspace);
    EXPECT_FALSE(a.untouched());
}

// --- multi-head attention: creation
// --------------------------------------------------------------------------------------

struct Module {
    std::vector<float> square = std::vector<float>(16 * 16, 0.1f), bias = std::vector<float>(16, 0.1f);
    attune::MhaConfig config{.d_model = 16, .Hq = 4};
    attune::MhaWeights weights{.wq = square, .wk = square, .wv = square, .wo = square};
};

TEST(MhaCreate, WrongConfigsAreNamed) {
    auto fails = [](const std::function<void(attune::MhaConfig &)> &change, const std::string &message) {
        Module m;
        change(m.config);
        expect_error([&] { attune::MultiHeadAttention(m.config, m.weights); }, kInvalid, message);
    };
    fails([](auto &c) { c.d_model = 0; }, "config.d_model is 0: expected 1 to 2147483647");
    fails([](auto &c) { c.d_model = -16; }, "config.d_model is -16");
    fails([](auto &c) { c.Hq = 0; }, "config.Hq is 0: expected 1 to");
    fails([](auto &c) { c.Hkv = 3; }, "config.Hkv is 3: expected a divisor of Hq = 4");
    fails([](auto &c) { c.Hkv = 8; }, "config.Hkv is 8: expected a divisor of Hq = 4");
    fails([](auto &c) { c.Hkv = -1; }, "config.Hkv is -1: expected 0 (as many as Hq) or a divisor of Hq");
    fails([](auto &c) { c.Hq = 3; },
          "config.dk is 0: expected a size, because d_model = 16 is not a multiple of Hq = 3");
    fails([](auto &c) { c.dk = -1; }, "config.dk is -1: expected 0 (d_model / Hq) or 1 to 536870911");
    fails([](auto &c) { c.dv = -1; }, "config.dv is -1");
    fails([](auto &c) { c.d_model_kv = -1; }, "config.d_model_kv is -1: expected 0 (as d_model) or 1 to");
    fails([](auto &c) { c.d_out = -1; }, "config.d_out is -1");
    fails([](auto &c) { c.layout = attune::WeightLayout(7); },
          "config.layout is 7: expected 0 (ATTUNE_WEIGHT_IN_OUT) or 1");
}

TEST(MhaCreate, WrongWeightsAreNamed) {
    auto fails = [](const std::function<void(Module &)> &change, const std::string &message) {
        Module m;
        change(m);
        expect_error([&] { attune::MultiHeadAttention(m.config, m.weights); }, kInvalid, message);
    };
    const std::vector<float> head(16 * 4), wrong(15);
    const std::vector<std::span<const float>> heads(4, head), three(3, head);
    fails([](auto &m) { m.weights.wk = {}; }, "weights.wk is null: expected 16 x 16 floats (or weights.wk_heads)");
    fails([&](auto &m) { m.weights.wv_heads = heads; }, "weights.wv and weights.wv_heads are both given");
    fails([&](auto &m) { m.weights.wo = wrong; }, "wo has 15 elements: expected 16 x 16");
    fails([&](auto &m) { m.weights.bq = wrong; }, "bq has 15 elements: expected 1 x 16");
    fails(
        [&](auto &m) {
            m.weights.wq = {};
            m.weights.wq_heads = three;
        },
        "wq_heads has 3 matrices: expected 4");
    fails(
        [&](auto &m) {
            m.weights.wq = {};
            m.weights.wq_heads = {head, head, wrong, head};
        },
        "wq_heads[2] has 15 elements: expected 16 x 4");

    // Null pointers, as a C program would pass them.
    Module m;
    const auto config = m.config.to_c();
    attune_mha_weights weights;
    attune_mha_weights_init(&weights);
    weights.wk = weights.wv = weights.wo = m.square.data();
    const float *pointers[4] = {head.data(), head.data(), nullptr, head.data()};
    weights.wq_heads = pointers;
    attune_mha *mha = reinterpret_cast<attune_mha *>(&m);
    EXPECT_EQ(attune_mha_create(&config, &weights, &mha), kInvalid);
    EXPECT_EQ(mha, nullptr);
    EXPECT_STREQ(attune_last_error(), "weights.wq_heads[2] is null: expected 16 x 4 floats");
    EXPECT_EQ(attune_mha_create(nullptr, &weights, &mha), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("config is null"));
    EXPECT_EQ(attune_mha_create(&config, nullptr, &mha), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("weights is null"));
    EXPECT_EQ(attune_mha_create(&config, &weights, nullptr), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("mha is null"));
    attune_mha_config unset{};
    EXPECT_EQ(attune_mha_create(&unset, &weights, &mha), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("config.struct_size is 0: expected"));
    EXPECT_THAT(attune_last_error(), HasSubstr("call attune_mha_config_init first"));
    attune_mha_destroy(nullptr);
}

class MhaLoad : public testing::Test {
  protected:
    std::string path =
        (std::filesystem::temp_directory_path() / ("attune_api_test_" + std::to_string(::getpid()))).string();
    Module m;
    std::map<std::string, attune::rt::SafetensorsFile::Tensor> tensors;
    attune::MhaNames names{"wq", "wk", "wv", "wo", "bq", "", "", ""};

    void SetUp() override {
        const auto bytes = std::as_bytes(std::span(m.square)), bias = std::as_bytes(std::span(m.bias));
        for (const char *name : {"wq", "wk", "wv", "wo"}) tensors[name] = {"F32", {16, 16}, bytes.data(), bytes.size()};
        tensors["bq"] = {"F32", {16}, bias.data(), bias.size()};
    }
    void TearDown() override { std::remove(path.c_str()); }
    void save() {
        std::string error;
        ASSERT_TRUE(attune::rt::write_safetensors(path, tensors, error)) << error;
    }
    void fails(attune_status status, const std::string &message) {
        expect_error([&] { attune::MultiHeadAttention::load(m.config, path, names); }, status, message);
    }
};

TEST_F(MhaLoad, WrongFilesAreNamed) {
    fails(ATTUNE_IO_ERROR, "cannot be opened");
    save();
    EXPECT_NO_THROW(attune::MultiHeadAttention::load(m.config, path, names));
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
    fails(ATTUNE_IO_ERROR, "truncated");
    tensors.erase("wv");
    save();
    fails(ATTUNE_IO_ERROR, "tensor 'wv' is missing (the file has 4 tensors: bq, wk, wo, wq) for wv");
    tensors["wv"] = tensors["wk"];
    tensors["wv"].shape = {8, 32};
    save();
    fails(ATTUNE_IO_ERROR, "tensor 'wv' is F32 [8, 32]: expected F32 [16, 16] for wv");
    tensors["wv"] = {"F16", {16, 16}, tensors["wk"].data, 512};
    save();
    fails(ATTUNE_IO_ERROR, "tensor 'wv' is F16 [16, 16]: expected F32 [16, 16] for wv");
    tensors["wv"] = tensors["wk"];
    tensors["bq"].dtype = "I32";
    save();
    fails(ATTUNE_IO_ERROR, "tensor 'bq' is I32 [16]: expected F32 [16] for bq");
}

TEST_F(MhaLoad, WrongArgumentsAreNamed) {
    save();
    names.wk = "";
    fails(kInvalid, "names[1] is null: expected the name of the tensor for wk");
    names.wk = "wk";
    m.config.Hkv = 3;
    fails(kInvalid, "config.Hkv is 3");
    m.config.Hkv = 0;
    const auto config = m.config.to_c();
    attune_mha *mha = nullptr;
    EXPECT_EQ(attune_mha_load(&config, nullptr, nullptr, &mha), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("safetensors_path is null"));
    EXPECT_EQ(attune_mha_load(&config, path.c_str(), nullptr, &mha), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("names is null"));
}

TEST_F(MhaLoad, TheLayoutDecidesTheShape) {
    m.config.d_model_kv = 8;
    tensors["wk"] = tensors["wv"] = {"F32", {8, 16}, tensors["wq"].data, 512};
    save();
    EXPECT_NO_THROW(attune::MultiHeadAttention::load(m.config, path, names));
    m.config.layout = attune::WeightLayout::out_in;
    fails(ATTUNE_IO_ERROR, "tensor 'wk' is F32 [8, 16]: expected F32 [16, 8] for wk");
}

// --- multi-head attention: calls
// -----------------------------------------------------------------------------------------

class MhaRun : public testing::Test {
  protected:
    Module m;
    attune::MultiHeadAttention mha{m.config, m.weights};
    std::vector<float> x = std::vector<float>(2 * 5 * 16, 0.5f), kv = std::vector<float>(2 * 7 * 16, 0.5f),
                       y = std::vector<float>(2 * 5 * 16, -77);
    attune::Workspace workspace;

    attune::MhaCall call() {
        return {.x_q = attune::rows(x, 2, 5, 16), .x_kv = attune::rows(kv, 2, 7, 16), .y = attune::rows(y, 2, 5, 16)};
    }
    void fails(const std::function<void(attune::MhaCall &)> &change, const std::string &message,
               attune_status status = kInvalid) {
        auto c = call();
        change(c);
        expect_error([&] { mha.run(c, workspace); }, status, message);
        EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](float v) { return v == -77; })) << "y was written";
    }
};

TEST_F(MhaRun, WrongTensorsAreNamed) {
    fails([&](auto &c) { c.x_q = {}; }, "call.x_q.shape[1] is 0: expected 1");
    fails([&](auto &c) { c.x_q = attune::rows(x, 2, 5, 8); }, "call.x_q.shape[3] is 8: expected d_model = 16");
    fails([&](auto &c) { c.x_kv = attune::rows(kv, 2, 7, 15); }, "call.x_kv.shape[3] is 15: expected d_model_kv = 16");
    fails([&](auto &c) { c.x_kv = attune::rows(kv, 1, 7, 16); }, "call.x_kv.shape[0] is 1: expected 2 as in call.x_q");
    fails([&](auto &c) { c.y = attune::rows(y, 2, 4, 16); }, "call.y.shape[2] is 4: expected 5 as in call.x_q");
    fails([&](auto &c) { c.y = attune::rows(y, 1, 5, 16); }, "call.y.shape[0] is 1: expected 2 as in call.x_q");
    fails([&](auto &c) { c.x_q.data = nullptr; }, "call.x_q.data is null: expected 2 x 5 x 16 floats");
    fails([&](auto &c) { c.y.data = nullptr; }, "call.y.data is null");
    fails([&](auto &c) { c.x_q.dtype = attune::Dtype::bf16; }, "call.x_q.dtype is bf16 (1): expected f32");
    fails([&](auto &c) { c.x_q.device = attune::Device::cuda; }, "call.x_q.device is 3: expected 0 (ATTUNE_CPU)");
    fails([&](auto &c) { c.x_q.shape[2] = -1; }, "call.x_q.shape[2] is -1: expected 0 or more");
    fails([&](auto &c) { c.x_q.stride[3] = 2; }, "call.x_q.stride[3] is 2: expected 1");
    fails([&](auto &c) { c.x_q.data = reinterpret_cast<const char *>(x.data()) + 1; },
          ": expected an address aligned to its 4-byte elements");
    fails([&](auto &c) { c.x_kv->stride[0] = INT64_MAX; },
          "call.x_kv.stride is [9223372036854775807, 0, 16, 1]: expected strides whose largest offset fits 63 bits");
    fails([&](auto &c) { c.y.stride[2] = 0; }, "call.y.stride is [80, 0, 0, 1]: expected rows that do not overlap");
    fails([&](auto &c) { c.y.stride[2] = 15; }, "expected rows that do not overlap: 5 rows of 16 floats in each of 2");
    fails([&](auto &c) { c.y.stride[0] = 79; }, "expected rows that do not overlap");
}

TEST_F(MhaRun, WrongProblemsAndExtrasAreNamed) {
    const std::vector<uint8_t> mask(2 * 7);
    const std::vector<int64_t> lengths = {7, 8}, one = {7};
    fails([&](auto &c) { c.attention.q_dtype = attune::Dtype::f16; }, "call.problem.q_dtype is f16 (2): expected f32");
    fails([&](auto &c) { c.attention.device = attune::Device::vulkan; }, "call.problem.device is 2: expected 0");
    fails([&](auto &c) { c.attention.window_left = -2; }, "window_left is -2");
    fails([&](auto &c) { c.attention.softcap = 0.0f; }, "softcap is 0");
    fails([&](auto &c) { c.attention.mask = true; }, "mask is null");
    fails([&](auto &c) { c.extras.mask = attune::per_key(mask, 2, 4, 5, 7); }, "mask is given");
    fails(
        [&](auto &c) {
            c.attention.mask = true;
            c.extras.mask = attune::per_key(mask, 2, 3, 5, 7);
        },
        "mask.shape");
    fails(
        [&](auto &c) {
            c.attention.kv_len = true;
            c.extras.kv_len = lengths;
        },
        "kv_len[1] is 8");
    fails(
        [&](auto &c) {
            c.attention.kv_len = true;
            c.extras.kv_len = one;
        },
        "kv_len has 1 entries: expected B = 2");
    fails([&](auto &c) { c.attention.scores = attune::Scores::probabilities; }, "scores is null");
}

TEST_F(MhaRun, SmallWorkspacesAreRefused) {
    const auto c = call();
    const size_t bytes = mha.workspace_size(c);
    std::vector<std::byte> memory(bytes);
    expect_error([&] { mha.run(c, std::span(memory).first(bytes - 1)); }, kInvalid,
                 "workspace_size is " + std::to_string(bytes - 1) + ": expected at least " + std::to_string(bytes));
    EXPECT_EQ(mha.try_run(c, std::span(memory).first(0)), kInvalid);
    EXPECT_EQ(y[0], -77);
    attune_mha_call unset{};
    EXPECT_EQ(attune_mha_run(mha.get(), &unset, memory.data(), bytes), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("call.struct_size is 0"));
    EXPECT_EQ(attune_mha_run(mha.get(), nullptr, memory.data(), bytes), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("call is null"));
    EXPECT_EQ(attune_mha_run(nullptr, &unset, memory.data(), bytes), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("mha is null"));
    EXPECT_EQ(attune_mha_workspace(mha.get(), &unset, nullptr), kInvalid);
    EXPECT_THAT(attune_last_error(), HasSubstr("bytes is null"));
    mha.run(c, std::span(memory));
    EXPECT_NE(y[0], -77);
}

} // namespace
