// The list of contestants.
#include "peers.h"

#include "error.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <unistd.h>

#if !defined(ATTUNE_PEERS_DIR) || !defined(ATTUNE_COUNTER)
#error "ATTUNE_PEERS_DIR: the folder of the peers' programs, and ATTUNE_COUNTER: the library that counts allocations"
#endif

namespace attune::tools {
namespace {

struct Peer {
    const char *impl, *title, *program; // program "": this one's own worker
};

constexpr std::array kPeers = {
    Peer{"torch_sdpa", "PyTorch SDPA", "torch_peers.py"},
    Peer{"torch_unfused", "PyTorch unfused", "torch_peers.py"},
    Peer{"torch_flex", "FlexAttention compiled", "torch_peers.py"},
    Peer{"ort_attention", "ONNX Runtime Attention", "onnxruntime_peers.py"},
    Peer{"ort_mha", "ONNX Runtime MultiHeadAttention", "onnxruntime_peers.py"},
    Peer{"ort_gqa", "ONNX Runtime GroupQueryAttention", "onnxruntime_peers.py"},
    Peer{"openvino", "OpenVINO", "openvino_peers.py"},
    Peer{"openblas", "unfused on OpenBLAS", ""},
};

std::string variable(const char *name) {
    const char *value = std::getenv(name);
    return value ? value : "";
}

std::string this_program() {
    std::error_code error;
    const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
    if (error) fail("/proc/self/exe: {}", error.message());
    return path;
}

std::string find_openblas(const std::string &environment) {
    std::error_code ignored;
    for (const auto &entry : std::filesystem::directory_iterator(environment + "/lib", ignored)) {
        const auto path = entry.path() / "site-packages/scipy_openblas32/lib/libscipy_openblas.so";
        if (std::filesystem::exists(path, ignored)) return path;
    }
    return "";
}

} // namespace

RemoteSpec attune_spec() {
    return {"attune", {this_program(), "worker", "attune"}, {}, ""};
}

std::vector<RemoteSpec> peer_specs() {
    const std::string environment = variable("ATTUNE_PEERS"), test = variable("ATTUNE_PEERS_TEST");
    std::vector<RemoteSpec> specs;
    if (!test.empty()) {
        for (const auto &entry : std::filesystem::directory_iterator(test))
            specs.push_back({entry.path().stem(), {entry.path()}, {}, ""});
        std::sort(specs.begin(), specs.end(), [](const auto &a, const auto &b) { return a.impl < b.impl; });
        return specs;
    }
    for (const Peer &peer : kPeers) {
        RemoteSpec spec;
        spec.impl = peer.impl;
        if (environment.empty()) {
            spec.missing = "not installed: ./attune bench --peers brings the peers' Python environment";
        } else if (*peer.program) {
            spec.command = {environment + "/bin/python", std::string(ATTUNE_PEERS_DIR) + "/" + peer.program, peer.impl};
            // One process each: compile in it, not in a pool of further ones. What was compiled once is kept.
            spec.environment = {
                {"TORCHINDUCTOR_COMPILE_THREADS", "1"}, {"TORCHINDUCTOR_CACHE_DIR", environment + "/cache/inductor"},
                {"CUDA_VISIBLE_DEVICES", ""},           {"PYTHONUNBUFFERED", "1"},
                {"PYTHONDONTWRITEBYTECODE", "1"},       {"LD_PRELOAD", ATTUNE_COUNTER}};
        } else if (const std::string library = find_openblas(environment); library.empty()) {
            spec.missing = "scipy-openblas32 is not in " + environment;
        } else {
            spec.command = {this_program(), "worker", "openblas", "--library", library};
        }
        specs.push_back(std::move(spec));
    }
    return specs;
}

std::string peer_title(const std::string &impl) {
    for (const Peer &peer : kPeers)
        if (impl == peer.impl) return peer.title;
    return impl;
}

} // namespace attune::tools
