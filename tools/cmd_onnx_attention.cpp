// attune onnx-attention: one Attention node of ONNX on tensors from a .safetensors file.
#include "commands.h"

#include "lib/error.h"
#include "lib/onnx_attention.h"
#include "lib/onnx_model.h"

#include <filesystem>
#include <fstream>
#include <iterator>

namespace attune::tools {
namespace {

struct OnnxOptions {
    std::string model, inputs, node, kernel, strategy, out;
    int threads = 0;
    double rtol = 1e-3, atol = 1e-7;
};

// The nodes that MODEL describes: a .onnx file, or JSON with one node, or with a list of them under "nodes".
std::vector<nlohmann::json> read_model(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file || !std::filesystem::is_regular_file(path))
        fail("MODEL is {}: it cannot be read; expected a .onnx or a JSON file", path);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const size_t begin = bytes.find_first_not_of(" \t\r\n");
    try {
        if (begin == std::string::npos || bytes[begin] != '{') return onnx_attention_nodes(bytes);
        const auto json = nlohmann::json::parse(bytes);
        if (json.contains("nodes")) return json["nodes"].get<std::vector<nlohmann::json>>();
        return {json};
    } catch (const nlohmann::json::exception &e) {
        fail("MODEL is {}: it is not valid JSON: {}", path, e.what());
    } catch (const Error &e) {
        fail("MODEL is {}: {}", path, e.what());
    }
}

nlohmann::json find_node(const OnnxOptions &options) {
    const auto nodes = read_model(options.model);
    if (nodes.empty()) fail("MODEL is {}: it has no Attention node; expected one", options.model);
    if (nodes.size() == 1 && options.node.empty()) return nodes[0];
    std::vector<std::string> known;
    for (const auto &node : nodes) {
        const auto name = node.is_object() ? node.value("name", nlohmann::json()) : nlohmann::json();
        if (name == options.node) return node;
        known.push_back(name.is_string() ? name.get<std::string>() : name.dump());
    }
    fail("--node={}: {} has no Attention node of that name; expected one of: {}", options.node, options.model,
         fmt::join(known, ", "));
}

void run_onnx_attention(const OnnxOptions &options, Status &status) {
    const OnnxAttentionNode node = parse_onnx_attention(find_node(options));
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
    command->add_option("MODEL", options->model, "The node: a .onnx file, or JSON")->required();
    command->add_option("INPUTS", options->inputs, "The tensors, as .safetensors, by the names that the node has")
        ->required();
    command->add_option("--node", options->node, "Which Attention node, if MODEL has several")->type_name("NAME");
    command->add_option("--kernel", options->kernel, "Take this kernel (default: the planner's choice)")
        ->type_name("NAME");
    command->add_option("--strategy", options->strategy, "Take a kernel of this strategy")->type_name("NAME");
    command->add_option("--threads", options->threads, "Number of threads (default: all cores)")->type_name("N");
    command->add_option("--out", options->out, "Write the outputs to this file, as .safetensors")->type_name("FILE");
    command->add_option("--rtol", options->rtol, "Relative tolerance (default 0.001)")->type_name("X");
    command->add_option("--atol", options->atol, "Absolute tolerance (default 1e-7)")->type_name("X");
    command->footer(
        "Where INPUTS holds a tensor of an output's name, it is what is expected; exit status 1 if the output is\n"
        "another one. As JSON, a node looks like this:\n\n"
        "  {\"op_type\": \"Attention\", \"opset\": 24, \"inputs\": [\"Q\", \"K\", \"V\"], \"outputs\": [\"Y\"],\n"
        "   \"attributes\": {\"is_causal\": 1}}\n\n"
        "Attention is computed in f32; f16, bf16 and f64 are converted on the way in and out. docs/onnx.md has more.");
    command->callback([options, &status] { run_onnx_attention(*options, status); });
}

} // namespace attune::tools
