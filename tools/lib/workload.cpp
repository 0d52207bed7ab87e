// Synthetic and real inputs for compare.
#include "workload.h"

#include "error.h"
#include "runtime/safetensors.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>

#ifndef ATTUNE_DATA_DIR
#error "ATTUNE_DATA_DIR: the folder of prepared inputs must be defined"
#endif

namespace attune::tools {
namespace {

using rt::SafetensorsFile;
using Tensor = SafetensorsFile::Tensor;

const Tensor &require(const SafetensorsFile &file, const std::string &path, const std::string &name, const char *dtype,
                      size_t rank) {
    const Tensor *t = file.find(name);
    if (!t) fail("{}: lacks tensor '{}'; expected {} of rank {}", path, name, dtype, rank);
    if (t->dtype != dtype) fail("{}: tensor '{}' is {}; expected {}", path, name, t->dtype, dtype);
    if (t->shape.size() != rank)
        fail("{}: tensor '{}' has shape {}; expected rank {}", path, name, rt::shape_string(t->shape), rank);
    return *t;
}

void expect_shape(const std::string &path, const std::string &name, const Tensor &t,
                  const std::vector<int64_t> &shape) {
    if (t.shape != shape)
        fail("{}: tensor '{}' has shape {}; expected {}", path, name, rt::shape_string(t.shape),
             rt::shape_string(shape));
}

} // namespace

int64_t Workload::rows_checked() const {
    int64_t rows = 0;
    for (const Reference &r : references) rows += int64_t(r.rows.size());
    return rows;
}

int64_t Workload::rows_total() const {
    int64_t rows = 0;
    for (const Reference &r : references) rows += r.total_rows;
    return rows;
}

Workload synthetic_workload(const Case &c, uint64_t seed) {
    Workload w;
    w.input = fmt::format("seed {}", seed);
    w.problem = c;
    InputOptions options;
    options.seed = seed;
    w.parts.push_back(std::make_unique<Inputs>(c, options));
    w.references.push_back(make_reference(w.parts[0]->problem(), w.parts[0]->tensors()));
    return w;
}

std::string model_path() {
    const char *path = std::getenv("ATTUNE_QKV");
    return path && *path ? path : ATTUNE_DATA_DIR "/minilm_qkv.safetensors";
}

Workload model_workload(const std::string &path, const std::string &title) {
    std::string error;
    const auto file = SafetensorsFile::open(path, error);
    if (!file) throw Error(error);
    int layers = 0;
    while (file->find(fmt::format("layer{}.q", layers))) ++layers;
    if (layers == 0) require(*file, path, "layer0.q", "F32", 4);

    Workload w;
    const Tensor q0 = require(*file, path, "layer0.q", "F32", 4);
    const Tensor k0 = require(*file, path, "layer0.k", "F32", 4);
    const Tensor v0 = require(*file, path, "layer0.v", "F32", 4);
    const Tensor lengths = require(*file, path, "lengths", "I64", 1);
    Case &c = w.problem;
    c.B = q0.shape[0];
    c.Hq = q0.shape[1];
    c.N = q0.shape[2];
    c.dk = q0.shape[3];
    c.Hkv = k0.shape[1];
    c.M = k0.shape[2];
    c.dv = v0.shape[3];
    if (c.dk < 1 || c.Hkv < 1 || c.Hq % c.Hkv != 0)
        fail("{}: layer0.q has shape {}, layer0.k {}; expected features >= 1 and query heads a multiple of key heads",
             path, rt::shape_string(q0.shape), rt::shape_string(k0.shape));
    expect_shape(path, "lengths", lengths, {c.B});
    for (int64_t b = 0; b < c.B; ++b) {
        int64_t length;
        std::memcpy(&length, lengths.data + b * 8, 8);
        if (length < 0 || length > c.M)
            fail("{}: lengths[{}]={}; expected 0 to {}, the number of keys", path, b, length, c.M);
        c.kv_len.push_back(length);
    }
    w.title = fmt::format("{}, {} layers", title, layers);
    w.input = std::filesystem::path(path).filename();
    for (int layer = 0; layer < layers; ++layer) {
        const auto part = [&](const char *which, const std::vector<int64_t> &shape) {
            const std::string name = fmt::format("layer{}.{}", layer, which);
            const Tensor t = require(*file, path, name, "F32", 4);
            expect_shape(path, name, t, shape);
            return reinterpret_cast<const float *>(t.data);
        };
        const float *q = part("q", {c.B, c.Hq, c.N, c.dk});
        const float *k = part("k", {c.B, c.Hkv, c.M, c.dk});
        const float *v = part("v", {c.B, c.Hkv, c.M, c.dv});
        w.parts.push_back(std::make_unique<Inputs>(c, InputOptions{}, q, k, v));
        ReferenceOptions options;
        options.budget /= layers; // the sample is shared among the layers
        w.references.push_back(make_reference(w.parts.back()->problem(), w.parts.back()->tensors(), options));
    }
    return w;
}

} // namespace attune::tools
