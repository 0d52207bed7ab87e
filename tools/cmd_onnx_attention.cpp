// attune onnx-attention: one Attention node of ONNX, described in JSON, on tensors from a .safetensors file.
#include "commands.h"

#include "lib/error.h"
#include "lib/onnx_attention.h"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>

namespace attune::tools {
namespace {

struct OnnxOptions {
    std::string model, inputs, node, kernel, strategy, out;
    int threads = 0;
    double rtol = 1e-3, atol = 1e-7;
};

nlohmann::json read_json(const std::string &path) {
    std::ifstream file(path);
    if (!file) fail("MODEL is {}: it cannot be read; expected a JSON file", path);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    try {
        return nlohmann::json::parse(text);
    } catch (const nlohmann::json::exception &e) {
        fail("MODEL is {}: it is not valid JSON: {}", path, e.what());
    }
}

// A file holds one node, or a list of them under "nodes".
nlohmann::json find_node(const nlohmann::json &model, const OnnxOptions &options) {
    if (!model.is_object() || !model.contains("nodes")) {
        if (!options.node.empty())
            fail("--node={}: {} holds one node only; expected no --node", options.node, options.model);
        return model;
    }
    std::vector<std::string> known;
    for (const auto &node : model["nodes"]) {
        const auto name = node.is_object() ? node.value("name", nlohmann::json()) : nlohmann::json();
        if (name == options.node) return node;
        known.push_back(name.is_string() ? name.get<std::string>() : name.dump());
    }
    if (options.node.empty())
        fail("--node is missing: {} has {} nodes; expected one's name", options.model, known.size());
    fail("--node={}: not in {}; expected one of: {}", options.node, options.model, fmt::join(known, ", "));
}

void run_onnx_attention(const OnnxOptions &options, Status &status) {
    const OnnxAttentionNode node = parse_onnx_attention(find_node(read_json(options.model), options));
    const OnnxTensors tensors = read_onnx_tensors(options.inputs);
    if (!options.out.empty()) check_writable(options.out);
    const OnnxAttention attention(node, tensors);
    const auto result = attention.run(options.kernel, options.strategy, options.threads, true);
    fmt::print("kernel {}\n", result.kernel);
    Table table({{"output", Table::Align::left},
                 {"type", Table::Align::left},
                 {"shape", Table::Align::left},
                 {"expected", Table::Align::left}});
    for (const auto &[name, tensor] : result.outputs) {
        std::string verdict = "not in the file";
        if (const auto expected = tensors.find(name); expected != tensors.end()) {
            verdict = onnx_difference(tensor, expected->second, options.rtol, options.atol);
            if (verdict.empty())
                verdict = "the same";
            else
                status.code = 1;
        }
        table.add({name, tensor.dtype, fmt::format("[{}]", fmt::join(tensor.shape, ", ")), verdict});
    }
    fmt::print("{}", table.text());
    if (!options.out.empty()) write_onnx_tensors(options.out, result.outputs);
}

} // namespace

void add_onnx_attention(CLI::App &app, Status &status) {
    auto options = std::make_shared<OnnxOptions>();
    CLI::App *command = app.add_subcommand("onnx-attention", "Run an Attention node of ONNX (opsets 23, 24, 25)");
    command->add_option("MODEL", options->model, "The node, as JSON")->required();
    command->add_option("INPUTS", options->inputs, "The tensors, as .safetensors, by the names that the node has")
        ->required();
    command->add_option("--node", options->node, "Which node, if the file has several")->type_name("NAME");
    command->add_option("--kernel", options->kernel, "Take this kernel (default: the planner's choice)")
        ->type_name("NAME");
    command->add_option("--strategy", options->strategy, "Take a kernel of this strategy")->type_name("NAME");
    command->add_option("--threads", options->threads, "Number of threads (default: all cores)")->type_name("N");
    command->add_option("--out", options->out, "Write the outputs to this file, as .safetensors")->type_name("FILE");
    command->add_option("--rtol", options->rtol, "Relative tolerance (default 0.001)")->type_name("X");
    command->add_option("--atol", options->atol, "Absolute tolerance (default 1e-7)")->type_name("X");
    command->footer(
        "Where INPUTS holds a tensor of an output's name, it is what is expected; exit status 1 if the output is\n"
        "another one. MODEL looks like this:\n\n"
        "  {\"op_type\": \"Attention\", \"opset\": 24, \"inputs\": [\"Q\", \"K\", \"V\"], \"outputs\": [\"Y\"],\n"
        "   \"attributes\": {\"is_causal\": 1}}\n\n"
        "Attention is computed in f32; f16, bf16 and f64 are converted on the way in and out. docs/onnx.md has more.");
    command->callback([options, &status] { run_onnx_attention(*options, status); });
}

} // namespace attune::tools
