// Workloads: the synthetic one, and the sentence encoder's file with everything that can be wrong with it.
#include "lib/error.h"
#include "lib/manifest.h"
#include "lib/numbers.h"
#include "lib/workload.h"
#include "runtime/safetensors.h"

#include <gtest/gtest.h>

namespace attune::tools {
namespace {

using Tensor = rt::SafetensorsFile::Tensor;

// A file of two layers, [2, 3 heads, 4 rows, 5 features].
struct Model {
    TemporaryFolder folder;
    std::string path = folder.file("qkv.safetensors");
    std::vector<float> numbers = std::vector<float>(120);
    std::vector<int64_t> lengths = {4, 2};
    std::map<std::string, Tensor> tensors;

    Model() {
        for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = float(i) / 100;
        for (const char *name : {"layer0.q", "layer0.k", "layer0.v", "layer1.q", "layer1.k", "layer1.v"})
            tensors[name] = {"F32", {2, 3, 4, 5}, reinterpret_cast<const std::byte *>(numbers.data()), 480};
        tensors["lengths"] = {"I64", {2}, reinterpret_cast<const std::byte *>(lengths.data()), 16};
    }
    void write() {
        std::string error;
        ASSERT_TRUE(rt::write_safetensors(path, tensors, error)) << error;
    }
    std::string error() {
        write();
        try {
            model_workload(path, "a model");
        } catch (const Error &e) {
            return e.what();
        }
        return "no error";
    }
};

TEST(Workload, ModelFile) {
    Model model;
    model.write();
    const Workload w = model_workload(model.path, "a model");
    EXPECT_EQ(w.title, "a model, 2 layers");
    EXPECT_EQ(w.input, "qkv.safetensors");
    ASSERT_EQ(w.parts.size(), 2u);
    EXPECT_EQ(to_string(w.problem), "f32:b2:h3:n4:d5:kvlen=4,2");
    EXPECT_EQ(load_element(w.parts[1]->tensors().q.data, ATTUNE_F32, 119), 1.19f);
    EXPECT_EQ(w.parts[1]->tensors().kv_len[1], 2);
    EXPECT_EQ(w.rows_total(), 48);
    EXPECT_EQ(w.rows_checked(), 48);
    EXPECT_EQ(w.flops(), 2.0 * 2 * 10 * 3 * 4 * (4 + 2)); // two layers
}

TEST(Workload, WhatCanBeWrongWithAModelFile) {
    Model missing;
    missing.tensors.erase("layer1.v");
    EXPECT_NE(missing.error().find("lacks tensor 'layer1.v'"), std::string::npos) << missing.error();
    Model type;
    type.tensors["layer0.k"].dtype = "I32";
    EXPECT_NE(type.error().find("tensor 'layer0.k' is I32; expected F32"), std::string::npos) << type.error();
    Model shape;
    shape.tensors["layer1.q"].shape = {2, 3, 5, 4};
    EXPECT_NE(shape.error().find("tensor 'layer1.q' has shape [2, 3, 5, 4]; expected [2, 3, 4, 5]"), std::string::npos)
        << shape.error();
    Model length;
    length.lengths[1] = 5;
    EXPECT_NE(length.error().find("lengths[1]=5; expected 0 to 4"), std::string::npos) << length.error();
    Model empty;
    for (const char *name : {"layer0.q", "layer1.q"}) empty.tensors.erase(name);
    EXPECT_NE(empty.error().find("lacks tensor 'layer0.q'"), std::string::npos) << empty.error();
    Model truncated;
    truncated.write();
    const std::string bytes = read_file(truncated.path);
    write_file(truncated.path, bytes.substr(0, bytes.size() - 1));
    EXPECT_THROW(model_workload(truncated.path, ""), Error);
    EXPECT_THROW(model_workload(truncated.folder.file("none"), ""), Error);
}

TEST(Workload, Synthetic) {
    const Workload w = synthetic_workload(parse_case("f32:h2:n8:d4:causal"), 3);
    EXPECT_EQ(w.input, "seed 3");
    EXPECT_EQ(w.flops(), 2.0 * 8 * 2 * 36);
    EXPECT_EQ(w.bytes(), 4.0 * 8 * 8 * 2 * 2);
}

} // namespace
} // namespace attune::tools
