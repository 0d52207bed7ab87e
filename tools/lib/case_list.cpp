#include "case_list.h"

#include "error.h"
#include "manifest.h"
#include "runtime/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>

namespace attune::tools {
namespace {

void add(std::vector<WeightedCase> &list, const Case &c, double count) {
    const auto it = std::find_if(list.begin(), list.end(), [&](const WeightedCase &w) { return w.c == c; });
    if (it == list.end())
        list.push_back({c, count});
    else
        it->count += count;
}

} // namespace

double WeightedCase::weight() const {
    // Five operations a byte are in balance on a core that does 100 GFLOP/s and reads 20 GB/s.
    return count * std::max({useful_flops(c), 5 * least_bytes(c), 1.0});
}

std::vector<WeightedCase> read_cases(const std::string &path) {
    const std::string text = read_file(path);
    std::vector<WeightedCase> list;
    if (text.find_first_not_of(" \t\r\n") != std::string::npos && text[text.find_first_not_of(" \t\r\n")] == '{') {
        try {
            const auto file = nlohmann::json::parse(text);
            for (const auto &word : file.at("cases")) add(list, parse_case(word.get<std::string>()), 1);
        } catch (const nlohmann::json::exception &e) {
            fail("--cases={}: {}; expected {{\"cases\": [\"f32:b1:h8:n128:d64\", …]}}, or a case a line", path,
                 e.what());
        }
    } else {
        std::istringstream lines(text);
        int number = 0;
        for (std::string line; std::getline(lines, line);) {
            ++number;
            std::istringstream words(line.substr(0, line.find('#')));
            std::string word, rest;
            if (!(words >> word)) continue;
            double count = 1;
            try {
                const Case c = parse_case(word);
                if (words >> rest) {
                    size_t used = 0;
                    try {
                        count = std::stod(rest, &used);
                    } catch (const std::exception &) {
                        used = 0;
                    }
                    if (used != rest.size() || !(count > 0) || words >> rest)
                        fail("'{}' behind the case: expected how often it occurs, a number above 0", rest);
                }
                add(list, c, count);
            } catch (const Error &e) {
                fail("--cases={}, line {}: {}", path, number, e.what());
            }
        }
    }
    if (list.empty()) fail("--cases={}: has no case; expected at least one", path);
    return list;
}

std::vector<WeightedCase> model_cases(const std::string &path) {
    std::string error;
    const auto file = rt::SafetensorsFile::open(path, error);
    if (!file) fail("--model={}", error);
    std::vector<WeightedCase> list;
    for (const auto &[name, q] : file->tensors()) {
        if (!name.ends_with(".q")) continue;
        const std::string layer = name.substr(0, name.size() - 2);
        const auto *k = file->find(layer + ".k"), *v = file->find(layer + ".v");
        if (!k || !v) fail("--model={}: has {} but not {}.k and {}.v; expected all three", path, name, layer, layer);
        for (const auto *t : {&q, k, v})
            if (t->dtype != "F32" || t->shape.size() != 4)
                fail("--model={}: a tensor of {} is {} {}; expected F32 of rank 4, [B, H, N, d]", path, layer, t->dtype,
                     rt::shape_string(t->shape));
        Case c;
        c.B = q.shape[0], c.Hq = q.shape[1], c.N = q.shape[2], c.dk = q.shape[3];
        c.Hkv = k->shape[1], c.M = k->shape[2], c.dv = v->shape[3];
        if (k->shape[0] != c.B || k->shape[3] != c.dk || v->shape[0] != c.B || v->shape[1] != c.Hkv ||
            v->shape[2] != c.M)
            fail("--model={}: {} has shapes {}, {}, {}; expected [B, H, N, d], [B, Hkv, M, d], [B, Hkv, M, dv]", path,
                 layer, rt::shape_string(q.shape), rt::shape_string(k->shape), rt::shape_string(v->shape));
        if (const auto *lengths = file->find("lengths");
            lengths && lengths->dtype == "I64" && lengths->shape == std::vector<int64_t>{c.B})
            for (int64_t b = 0; b < c.B; ++b) {
                int64_t length;
                std::memcpy(&length, lengths->data + b * 8, 8);
                c.kv_len.push_back(std::clamp<int64_t>(length, 0, c.M));
            }
        add(list, parse_case(to_string(c)), 1); // and its sizes are checked
    }
    if (list.empty()) fail("--model={}: has no tensor NAME.q; expected NAME.q, NAME.k and NAME.v for each layer", path);
    return list;
}

} // namespace attune::tools
