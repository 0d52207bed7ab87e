// Sentence embeddings by all-MiniLM-L6-v2, a transformer encoder of 6 layers with 12 heads of 32 features, on attune's
// public API: multi-head attention is attune's (weights straight from the model's .safetensors file), everything around
// it is plain small code below.
//
// The input is a directory made by prepare.py (token ids of a text, and where the model is). The text is encoded twice:
// as one padded batch, where kv_len hides the padding, and sentence by sentence without any. --check compares both with
// embeddings computed in float64 and with each other; --dump-qkv writes what attention gets to see in every layer, and
// --dump-weights the attention weights.
#include "attune/attune.hpp"
#include "runtime/safetensors.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

using attune::rt::SafetensorsFile;

constexpr int64_t kLayers = 6, kHeads = 12, kHidden = 384, kFeedForward = 1536, kHeadFeatures = kHidden / kHeads;
constexpr float kEpsilon = 1e-12f; // of layer norm, as in the model's configuration
constexpr int64_t kDumpedSentences = 8;

// --- the model's file -----------------------------------------------------------------------------------------------

SafetensorsFile open_file(const std::string &path) {
    std::string error;
    auto file = SafetensorsFile::open(path, error);
    if (!file) throw std::runtime_error(error);
    return *std::move(file);
}

template <class T> const T *values(const SafetensorsFile &file, const std::string &name, const std::string &dtype,
                                   const std::vector<int64_t> &shape) {
    std::string error;
    const auto *tensor = file.require(name, dtype, shape, error);
    if (!tensor) throw std::runtime_error(error);
    return reinterpret_cast<const T *>(tensor->data);
}

std::vector<int64_t> shape_of(const SafetensorsFile &file, const std::string &name, size_t rank) {
    const auto *tensor = file.find(name);
    if (!tensor || tensor->shape.size() != rank)
        throw std::runtime_error("safetensors file '" + file.path() + "': tensor '" + name + "' is " +
                                 (tensor ? "of shape " + attune::rt::shape_string(tensor->shape) : "missing") +
                                 ": expected " + std::to_string(rank) + " dimensions");
    return tensor->shape;
}

// --- plain small code around attention ------------------------------------------------------------------------------

// y = x W^T + b. W is packed in panels of 8 outputs, and 4 rows of x share each weight that is loaded: 8 vector
// accumulators of 4 floats, which every x86-64 and ARM core has registers for.
class Linear {
  public:
    Linear(const SafetensorsFile &file, const std::string &name, int64_t in, int64_t out)
        : in_(in), out_(out), packed_(size_t(in * out)) {
        const float *w = values<float>(file, name + ".weight", "F32", {out, in});
        const float *b = values<float>(file, name + ".bias", "F32", {out});
        bias_.assign(b, b + out);
        for (int64_t c = 0; c < out; c++)
            for (int64_t k = 0; k < in; k++) packed_[(c / kPanel * in + k) * kPanel + c % kPanel] = w[c * in + k];
    }

    void operator()(const float *x, int64_t rows, float *y) const {
        int64_t r = 0;
        for (; r + kRows <= rows; r += kRows) block<kRows>(x + r * in_, y + r * out_);
        for (; r < rows; r++) block<1>(x + r * in_, y + r * out_);
    }

  private:
    static constexpr int64_t kPanel = 8, kRows = 4;

    template <int64_t R> void block(const float *x, float *y) const {
        for (int64_t c = 0; c < out_; c += kPanel) {
            float sum[R][kPanel];
            for (int64_t r = 0; r < R; r++)
                for (int64_t i = 0; i < kPanel; i++) sum[r][i] = bias_[c + i];
            const float *w = &packed_[c * in_];
            for (int64_t k = 0; k < in_; k++, w += kPanel)
                for (int64_t r = 0; r < R; r++)
                    for (int64_t i = 0; i < kPanel; i++) sum[r][i] += x[r * in_ + k] * w[i];
            for (int64_t r = 0; r < R; r++) std::copy_n(sum[r], kPanel, y + r * out_ + c);
        }
    }

    int64_t in_, out_;
    std::vector<float> packed_, bias_;
};

class LayerNorm {
  public:
    LayerNorm(const SafetensorsFile &file, const std::string &name) {
        const float *g = values<float>(file, name + ".weight", "F32", {kHidden});
        const float *b = values<float>(file, name + ".bias", "F32", {kHidden});
        gain_.assign(g, g + kHidden);
        bias_.assign(b, b + kHidden);
    }

    void operator()(float *x) const {
        float mean = 0, variance = 0;
        for (int64_t i = 0; i < kHidden; i++) mean += x[i] / kHidden;
        for (int64_t i = 0; i < kHidden; i++) variance += (x[i] - mean) * (x[i] - mean) / kHidden;
        const float factor = 1 / std::sqrt(variance + kEpsilon);
        for (int64_t i = 0; i < kHidden; i++) x[i] = (x[i] - mean) * factor * gain_[i] + bias_[i];
    }

  private:
    std::vector<float> gain_, bias_;
};

float gelu(float x) {
    return 0.5f * x * (1 + std::erf(x * 0.70710678f));
}

// --- the encoder ----------------------------------------------------------------------------------------------------

std::string layer_name(int64_t layer) {
    return "encoder.layer." + std::to_string(layer);
}

attune::MultiHeadAttention load_attention(const SafetensorsFile &file, int64_t layer) {
    const std::string prefix = layer_name(layer) + ".attention.";
    return attune::MultiHeadAttention::load({.d_model = kHidden, .Hq = kHeads, .layout = attune::WeightLayout::out_in},
                                            file.path(),
                                            {.wq = prefix + "self.query.weight",
                                             .wk = prefix + "self.key.weight",
                                             .wv = prefix + "self.value.weight",
                                             .wo = prefix + "output.dense.weight",
                                             .bq = prefix + "self.query.bias",
                                             .bk = prefix + "self.key.bias",
                                             .bv = prefix + "self.value.bias",
                                             .bo = prefix + "output.dense.bias"});
}

struct Layer {
    attune::MultiHeadAttention attention;
    LayerNorm attention_norm;
    Linear up, down;
    LayerNorm output_norm;

    Layer(const SafetensorsFile &file, int64_t i)
        : attention(load_attention(file, i)), attention_norm(file, layer_name(i) + ".attention.output.LayerNorm"),
          up(file, layer_name(i) + ".intermediate.dense", kHidden, kFeedForward),
          down(file, layer_name(i) + ".output.dense", kFeedForward, kHidden),
          output_norm(file, layer_name(i) + ".output.LayerNorm") {}
};

// Called with each layer's input, [B, N, kHidden].
using Watcher = std::function<void(int64_t layer, const std::vector<float> &x)>;

class Encoder {
  public:
    explicit Encoder(const SafetensorsFile &file)
        : vocabulary_(shape_of(file, "embeddings.word_embeddings.weight", 2)[0]),
          positions_(shape_of(file, "embeddings.position_embeddings.weight", 2)[0]),
          word_(values<float>(file, "embeddings.word_embeddings.weight", "F32", {vocabulary_, kHidden})),
          position_(values<float>(file, "embeddings.position_embeddings.weight", "F32", {positions_, kHidden})),
          type_(values<float>(file, "embeddings.token_type_embeddings.weight", "F32", {2, kHidden})),
          norm_(file, "embeddings.LayerNorm") {
        for (int64_t i = 0; i < kLayers; i++) layers_.emplace_back(file, i);
    }

    int64_t vocabulary() const { return vocabulary_; }
    int64_t positions() const { return positions_; }

    // ids [B, N], lengths [B] -> embeddings [B, kHidden] of length 1. Rows of padding go through attention, whose
    // kv_len keeps them from being seen; the code outside attention leaves them out.
    std::vector<float> encode(const int64_t *ids, const std::vector<int64_t> &lengths, int64_t N,
                              const Watcher &watch = {}) {
        const int64_t B = int64_t(lengths.size());
        const bool has_padding = std::any_of(lengths.begin(), lengths.end(), [N](int64_t n) { return n < N; });
        std::vector<float> x(size_t(B * N * kHidden)), y(x.size()), inner(size_t(N * kFeedForward));
        auto row = [&](std::vector<float> &matrix, int64_t b, int64_t i) {
            return &matrix[size_t((b * N + i) * kHidden)];
        };

        for (int64_t b = 0; b < B; b++)
            for (int64_t i = 0; i < N; i++) {
                float *to = row(x, b, i);
                for (int64_t c = 0; c < kHidden; c++)
                    to[c] = word_[ids[b * N + i] * kHidden + c] + position_[i * kHidden + c] + type_[c];
                norm_(to);
            }

        for (int64_t layer = 0; layer < kLayers; layer++) {
            if (watch) watch(layer, x);
            const Layer &l = layers_[size_t(layer)];
            l.attention.run({.x_q = attune::rows(x, B, N, kHidden),
                             .y = attune::rows(y, B, N, kHidden),
                             .attention = {.kv_len = has_padding},
                             .extras = {.kv_len = has_padding ? std::span(lengths) : std::span<const int64_t>()}},
                            workspace_);
            for (int64_t b = 0; b < B; b++) {
                const int64_t n = lengths[size_t(b)];
                float *hidden = row(x, b, 0), *change = row(y, b, 0);
                for (int64_t i = 0; i < n * kHidden; i++) hidden[i] += change[i];
                for (int64_t i = 0; i < n; i++) l.attention_norm(hidden + i * kHidden);
                l.up(hidden, n, inner.data());
                for (int64_t i = 0; i < n * kFeedForward; i++) inner[size_t(i)] = gelu(inner[size_t(i)]);
                l.down(inner.data(), n, change);
                for (int64_t i = 0; i < n * kHidden; i++) hidden[i] += change[i];
                for (int64_t i = 0; i < n; i++) l.output_norm(hidden + i * kHidden);
            }
        }

        std::vector<float> result(size_t(B * kHidden));
        for (int64_t b = 0; b < B; b++) {
            float *mean = &result[size_t(b * kHidden)];
            for (int64_t i = 0; i < lengths[size_t(b)]; i++)
                for (int64_t c = 0; c < kHidden; c++) mean[c] += row(x, b, i)[c];
            float squares = 0;
            for (int64_t c = 0; c < kHidden; c++) squares += mean[c] * mean[c];
            for (int64_t c = 0; c < kHidden; c++) mean[c] /= std::sqrt(squares);
        }
        return result;
    }

  private:
    int64_t vocabulary_, positions_;
    const float *word_, *position_, *type_;
    LayerNorm norm_;
    std::vector<Layer> layers_;
    attune::Workspace workspace_;
};

// --- input ----------------------------------------------------------------------------------------------------------

struct Input {
    std::string model;
    std::vector<std::string> lines; // the text, for showing
    std::vector<int64_t> ids;       // [B, N]
    std::vector<int64_t> lengths;   // [B]
    int64_t N = 0;
};

Input read_input(const std::string &directory) {
    Input input;
    const std::string paths = directory + "/paths.json";
    std::ifstream stream(paths);
    if (!stream)
        throw std::runtime_error("file '" + paths + "' cannot be read: expected a directory made by prepare.py");
    std::string text;
    try {
        const auto json = nlohmann::json::parse(stream);
        input.model = json.at("model").get<std::string>();
        text = json.at("text").get<std::string>();
    } catch (const nlohmann::json::exception &e) {
        throw std::runtime_error("file '" + paths + "' is not as prepare.py writes it: " + e.what());
    }

    const SafetensorsFile tokens = open_file(directory + "/tokens.safetensors");
    const auto shape = shape_of(tokens, "ids", 2);
    const int64_t *ids = values<int64_t>(tokens, "ids", "I64", shape);
    const int64_t *lengths = values<int64_t>(tokens, "lengths", "I64", {shape[0]});
    input.ids.assign(ids, ids + shape[0] * shape[1]);
    input.lengths.assign(lengths, lengths + shape[0]);
    input.N = shape[1];
    for (size_t b = 0; b < input.lengths.size(); b++)
        if (input.lengths[b] < 1 || input.lengths[b] > input.N)
            throw std::runtime_error("safetensors file '" + tokens.path() + "': lengths[" + std::to_string(b) +
                                     "] is " + std::to_string(input.lengths[b]) + ": expected 1 to " +
                                     std::to_string(input.N));

    std::ifstream text_stream(text);
    if (!text_stream) throw std::runtime_error("text file '" + text + "' cannot be read");
    for (std::string line; std::getline(text_stream, line);)
        if (line.find_first_not_of(" \t\r") != std::string::npos) input.lines.push_back(line);
    if (input.lines.size() != input.lengths.size())
        throw std::runtime_error("text file '" + text + "' has " + std::to_string(input.lines.size()) +
                                 " lines: expected " + std::to_string(input.lengths.size()) + " as in '" +
                                 tokens.path() + "': run prepare.py again");
    return input;
}

// --- what is done with the embeddings
// ---------------------------------------------------------------------------------

// Cosine, in double so that the sum adds no error of its own.
template <class A, class B> double cosine(const A *a, const B *b) {
    double ab = 0, aa = 0, bb = 0;
    for (int64_t c = 0; c < kHidden; c++) {
        ab += double(a[c]) * b[c];
        aa += double(a[c]) * a[c];
        bb += double(b[c]) * b[c];
    }
    return ab / std::sqrt(aa * bb);
}

// The beginning of a line, cut between characters.
std::string beginning(const std::string &line, size_t most) {
    if (line.size() <= most) return line;
    size_t end = most;
    while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xC0) == 0x80) end--;
    return line.substr(0, end) + " ...";
}

void show_similarities(const Input &input, const std::vector<float> &embeddings) {
    struct Pair {
        double similarity;
        size_t a, b;
    };
    std::vector<Pair> pairs;
    for (size_t a = 0; a < input.lines.size(); a++)
        for (size_t b = a + 1; b < input.lines.size(); b++)
            pairs.push_back({cosine(&embeddings[a * kHidden], &embeddings[b * kHidden]), a, b});
    std::sort(pairs.begin(), pairs.end(), [](const Pair &x, const Pair &y) { return x.similarity > y.similarity; });
    auto show = [&](const Pair &pair) {
        const int bar = int(std::lround(std::max(pair.similarity, 0.0) * 20));
        std::printf("  %5.2f %-20s  %s\n%30s%s\n", pair.similarity, std::string(size_t(bar), '#').c_str(),
                    beginning(input.lines[pair.a], 84).c_str(), "", beginning(input.lines[pair.b], 84).c_str());
    };
    const size_t shown = std::min<size_t>(6, pairs.size());
    std::printf("The most similar of %zu sentences:\n", input.lines.size());
    for (size_t i = 0; i < shown; i++) show(pairs[i]);
    if (pairs.size() <= shown) return;
    std::printf("and the least similar:\n");
    show(pairs.back());
}

bool check_embeddings(const Input &input, const std::string &path, const std::vector<float> &padded,
                      const std::vector<float> &unpadded) {
    constexpr double kLeastCosine = 0.99999;
    const int64_t B = int64_t(input.lengths.size());
    const SafetensorsFile file = open_file(path);
    const double *reference = values<double>(file, "embeddings", "F64", {B, kHidden});
    bool right = true;
    double least[3] = {1, 1, 1};
    for (int64_t b = 0; b < B; b++) {
        const float *p = &padded[size_t(b * kHidden)], *u = &unpadded[size_t(b * kHidden)];
        const double cosines[3] = {cosine(p, reference + b * kHidden), cosine(u, reference + b * kHidden),
                                   cosine(p, u)};
        static constexpr const char *kNames[3] = {"padded and float64", "unpadded and float64", "padded and unpadded"};
        for (int i = 0; i < 3; i++) {
            least[i] = std::min(least[i], cosines[i]);
            if (cosines[i] >= kLeastCosine) continue; // NaN does not pass
            std::fprintf(stderr, "FAILED: sentence %lld (%lld tokens): cosine of %s is %.8f: expected at least %.5f\n",
                         static_cast<long long>(b), static_cast<long long>(input.lengths[size_t(b)]), kNames[i],
                         cosines[i], kLeastCosine);
            right = false;
        }
    }
    std::printf(
        "%lld sentences of %lld to %lld tokens against float64: 1 - cosine at most %.1e padded in one batch, %.1e "
        "one by one, %.1e between the two\n",
        static_cast<long long>(B),
        static_cast<long long>(*std::min_element(input.lengths.begin(), input.lengths.end())),
        static_cast<long long>(*std::max_element(input.lengths.begin(), input.lengths.end())), 1 - least[0],
        1 - least[1], 1 - least[2]);
    return right;
}

// The first sentences, and Q, K and V of every layer for them, [B, H, N, d], as attention sees them: "layer0.q" and so
// on. The projections are inside MultiHeadAttention, so they are computed here once more from the layer's input.
struct Heads {
    int64_t B = 0, N = 0;
    std::vector<int64_t> lengths;
    std::map<std::string, std::vector<float>> values;
};

Heads heads_of_first_sentences(Encoder &encoder, const SafetensorsFile &model, const Input &input) {
    Heads result;
    const int64_t B = result.B = std::min<int64_t>(kDumpedSentences, int64_t(input.lengths.size()));
    result.lengths.assign(input.lengths.begin(), input.lengths.begin() + B);
    const int64_t N = result.N = *std::max_element(result.lengths.begin(), result.lengths.end());
    std::vector<int64_t> ids;
    for (int64_t b = 0; b < B; b++)
        ids.insert(ids.end(), input.ids.begin() + b * input.N, input.ids.begin() + b * input.N + N);

    encoder.encode(ids.data(), result.lengths, N, [&](int64_t layer, const std::vector<float> &x) {
        for (const auto &[letter, part] : {std::pair("q", "query"), std::pair("k", "key"), std::pair("v", "value")}) {
            const Linear project(model, layer_name(layer) + ".attention.self." + part, kHidden, kHidden);
            std::vector<float> rows(x.size()), heads(x.size());
            project(x.data(), B * N, rows.data());
            for (int64_t b = 0; b < B; b++)
                for (int64_t h = 0; h < kHeads; h++)
                    for (int64_t i = 0; i < N; i++)
                        std::copy_n(&rows[size_t((b * N + i) * kHidden + h * kHeadFeatures)], kHeadFeatures,
                                    &heads[size_t(((b * kHeads + h) * N + i) * kHeadFeatures)]);
            result.values["layer" + std::to_string(layer) + "." + letter] = std::move(heads);
        }
    });
    return result;
}

// Arrays [B, H, N, features], and the lengths of the sentences.
void write_heads(const std::string &path, const char *what, const Heads &heads, int64_t features) {
    std::map<std::string, SafetensorsFile::Tensor> tensors;
    auto bytes = [](const auto &vector) { return std::as_bytes(std::span(vector)); };
    for (const auto &[name, data] : heads.values)
        tensors[name] = {"F32", {heads.B, kHeads, heads.N, features}, bytes(data).data(), bytes(data).size()};
    tensors["lengths"] = {"I64", {heads.B}, bytes(heads.lengths).data(), bytes(heads.lengths).size()};
    std::string error;
    if (!attune::rt::write_safetensors(path, tensors, error)) throw std::runtime_error(error);
    std::printf("%s of %lld layers, [%lld, %lld, %lld, %lld], written to %s\n", what, static_cast<long long>(kLayers),
                static_cast<long long>(heads.B), static_cast<long long>(kHeads), static_cast<long long>(heads.N),
                static_cast<long long>(features), path.c_str());
}

// The attention weights of every layer, [B, H, N, N]: what the scores output of attention holds, asked for its last
// stage.
Heads attention_weights(const Heads &qkv) {
    const int64_t B = qkv.B, N = qkv.N;
    const attune::Plan plan = attune::plan(
        {.B = B, .Hq = kHeads, .N = N, .dk = kHeadFeatures, .kv_len = true, .scores = attune::Scores::probabilities});
    attune::Workspace workspace;
    Heads result{B, N, qkv.lengths, {}};
    std::vector<float> o(size_t(B * kHeads * N * kHeadFeatures));
    for (int64_t layer = 0; layer < kLayers; layer++) {
        const std::string name = "layer" + std::to_string(layer);
        std::vector<float> weights(size_t(B * kHeads * N * N));
        auto view = [&](const char *letter) {
            return attune::bhsd(qkv.values.at(name + letter), B, kHeads, N, kHeadFeatures);
        };
        attune::run(plan,
                    {.q = view(".q"),
                     .k = view(".k"),
                     .v = view(".v"),
                     .o = attune::bhsd(o, B, kHeads, N, kHeadFeatures),
                     .extras = {.scores = attune::bhsd(weights, B, kHeads, N, N), .kv_len = qkv.lengths}},
                    workspace);
        result.values[name + ".weights"] = std::move(weights);
    }
    return result;
}

} // namespace

int main(int argc, char **argv) {
    CLI::App app("Sentence embeddings by all-MiniLM-L6-v2 on attune's multi-head attention");
    std::string directory, reference, dump, weights;
    app.add_option("DIRECTORY", directory, "made by prepare.py: tokens.safetensors and paths.json")->required();
    app.add_option("--check", reference, "compare with the float64 embeddings in this .safetensors file");
    app.add_option("--dump-qkv", dump,
                   "write Q, K and V of all layers for the first sentences to this .safetensors file");
    app.add_option("--dump-weights", weights,
                   "write the attention weights of all layers for the first sentences to this .safetensors file "
                   "(attune report --weights draws them)");
    CLI11_PARSE(app, argc, argv);
    try {
        const Input input = read_input(directory);
        const SafetensorsFile model = open_file(input.model);
        Encoder encoder(model);
        if (input.N > encoder.positions())
            throw std::runtime_error("the longest sentence has " + std::to_string(input.N) +
                                     " tokens: expected at most " + std::to_string(encoder.positions()));
        for (int64_t id : input.ids)
            if (id < 0 || id >= encoder.vocabulary())
                throw std::runtime_error("a token id is " + std::to_string(id) + ": expected 0 to " +
                                         std::to_string(encoder.vocabulary() - 1));
        if (!dump.empty() || !weights.empty()) {
            const Heads qkv = heads_of_first_sentences(encoder, model, input);
            if (!dump.empty()) write_heads(dump, "Q, K and V", qkv, kHeadFeatures);
            if (!weights.empty()) write_heads(weights, "Attention weights", attention_weights(qkv), qkv.N);
            if (reference.empty()) return EXIT_SUCCESS;
        }

        const std::vector<float> padded = encoder.encode(input.ids.data(), input.lengths, input.N);
        std::vector<float> unpadded;
        for (size_t b = 0; b < input.lengths.size(); b++) {
            const auto one = encoder.encode(&input.ids[b * size_t(input.N)], {input.lengths[b]}, input.lengths[b]);
            unpadded.insert(unpadded.end(), one.begin(), one.end());
        }
        show_similarities(input, padded);
        if (!reference.empty() && !check_embeddings(input, reference, padded, unpadded)) return EXIT_FAILURE;
    } catch (const std::exception &e) {
        std::fprintf(stderr, "error: %s\n", e.what());
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
