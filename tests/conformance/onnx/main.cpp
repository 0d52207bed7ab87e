// The cases that export.py wrote, each on every kernel that can do it.
//
//   onnx_conformance FOLDER
//
// A line for each suite, "onnx attention: 93/93", and what went wrong before it. Exit status 1 if anything did.
#include "attune/kernel.h"
#include "lib/error.h"
#include "lib/onnx_attention.h"
#include "lib/onnx_model.h"
#include "lib/runner.h"

#include <algorithm>
#include <fmt/ranges.h>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

using namespace attune::tools;

namespace {

struct Suite {
    int cases = 0, right = 0;
    int64_t runs = 0;
    std::vector<std::string> stagewise_only;
    std::set<std::string> kernels;
    std::map<std::string, std::string> as; // what stands in for an operator that is not Attention
};

std::string contents(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fail("{} cannot be read; expected what export.py writes", path);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Runs one case; returns what is wrong, a line each.
std::vector<std::string> run_case(const nlohmann::json &node, const std::string &folder, Suite &suite) {
    std::vector<std::string> wrong;
    const OnnxAttentionNode parsed = parse_onnx_attention(node);
    if (node.contains("model")) {
        const auto in_model = onnx_attention_nodes(contents(folder + "/" + node["model"].get<std::string>()));
        if (in_model.size() != 1) fail("the model has {} Attention nodes: expected 1", in_model.size());
        for (const char *key : {"op_type", "opset", "inputs", "outputs", "attributes"})
            if (in_model[0].at(key) != node.at(key))
                wrong.push_back(
                    fmt::format("{} in the model is {}: expected {}", key, in_model[0][key].dump(), node[key].dump()));
    }
    const OnnxTensors tensors = read_onnx_tensors(folder + "/" + node.at("file").get<std::string>());
    const OnnxAttention attention(parsed, tensors);
    const double rtol = node.at("rtol"), atol = node.at("atol");

    const auto check = [&](const std::string &kernel, bool with_scores) {
        const auto result = attention.run(kernel, "", 0, with_scores);
        if (!kernel.empty() && result.kernel != kernel)
            wrong.push_back(fmt::format("{}: the plan took {} instead", kernel, result.kernel));
        for (size_t i = 0; i < parsed.outputs.size(); ++i) {
            const std::string &name = parsed.outputs[i];
            const bool is_scores = i == 3, is_present = i == 1 || i == 2;
            if (name.empty() || (is_scores && !with_scores)) continue;
            if (!result.outputs.contains(name) || !tensors.contains(name)) {
                wrong.push_back(fmt::format("{}: no output {}, or none in the file", result.kernel, name));
                continue;
            }
            // What is only copied has to be the same bits.
            const std::string difference = onnx_difference(result.outputs.at(name), tensors.at(name),
                                                           is_present ? 0 : rtol, is_present ? 0 : atol);
            if (!difference.empty()) wrong.push_back(fmt::format("{}: {}: {}", result.kernel, name, difference));
        }
        ++suite.runs;
        suite.kernels.insert(result.kernel);
    };

    check("", true); // the planner's choice
    std::set<std::string> strategies;
    bool fused = false;
    const attune_problem whole = attention.problem(true), without_scores = attention.problem(false);
    for (const attune_kernel *kernel : all_kernels()) {
        if (!attune_kernel_refuses(kernel, &whole)) {
            strategies.insert(kernel->strategy);
            check(kernel->name, true);
        } else if (!attune_kernel_refuses(kernel, &without_scores)) {
            check(kernel->name, false); // all but qk_matmul_output
        } else {
            continue;
        }
        fused = fused || !(kernel->traits & ATTUNE_TRAIT_QUADRATIC);
    }
    if (!fused) wrong.push_back("no kernel does Y without keeping all scores in memory");
    if (strategies == std::set<std::string>{"stagewise"}) suite.stagewise_only.push_back(node.at("name"));
    return wrong;
}

int run(const std::string &folder) {
    const nlohmann::json index = nlohmann::json::parse(contents(folder + "/index.json"));
    std::map<std::string, Suite> suites{{"attention", {}}, {"flexattention", {}}, {"expansion", {}}};
    for (const auto &node : index.at("nodes")) {
        const std::string name = node.at("name");
        Suite &suite = suites.at(node.at("suite").get<std::string>());
        ++suite.cases;
        if (node.contains("as")) suite.as[name] = node["as"].get<std::string>();
        std::vector<std::string> wrong;
        try {
            wrong = run_case(node, folder, suite);
        } catch (const Error &e) {
            wrong = {e.what()};
        }
        if (wrong.empty()) ++suite.right;
        for (const std::string &line : wrong) fmt::print("WRONG  {}: {}\n", name, line);
    }

    Suite &attention = suites["attention"], &flex = suites["flexattention"], &expansion = suites["expansion"];
    const auto &without = index.at("without_equivalent");
    fmt::print("{} cases want the scores, which only stagewise gives; the others do the rest of these cases:\n  {}\n",
               attention.stagewise_only.size(), fmt::join(attention.stagewise_only, "\n  "));
    for (const auto &[name, how] : flex.as) fmt::print("{}: Attention, {}\n", name, how);
    for (const auto &entry : without)
        fmt::print("{}: no equivalent: {}\n", entry.at("name").get<std::string>(),
                   entry.at("reason").get<std::string>());
    fmt::print("of {} FlexAttention cases {} have an equivalent; runs of kernels: {} attention, {} flexattention, {} "
               "expansion\n",
               size_t(flex.cases) + without.size(), flex.cases, attention.runs, flex.runs, expansion.runs);
    for (const auto &[name, suite] : suites) fmt::print("kernels in {}: {}\n", name, suite.kernels.size());
    for (const attune_kernel *kernel : all_kernels())
        if (std::none_of(suites.begin(), suites.end(),
                         [&](const auto &s) { return s.second.kernels.contains(kernel->name); }))
            fmt::print("no case for {}\n", kernel->name);
    // ./attune test shows lines of this form.
    for (const auto &[name, suite] : suites) fmt::print("onnx {}: {}/{}\n", name, suite.right, suite.cases);
    bool ok = attention.cases == 93 && size_t(flex.cases) + without.size() == 22 && expansion.cases > 0;
    for (const auto &[name, suite] : suites) ok = ok && suite.right == suite.cases;
    return ok ? 0 : 1;
}

} // namespace

int main(int argc, char **argv) {
    try {
        if (argc != 2) fail("{} arguments; expected the folder that export.py wrote", argc - 1);
        return run(argv[1]);
    } catch (const std::exception &e) {
        fmt::print(stderr, "onnx_conformance: {}\n", e.what());
        return 2;
    }
}
