// The manifest of generated kernels, and running the generator program.
#include "manifest.h"

#include "error.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <spawn.h>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>

#ifndef ATTUNE_KERNEL_DIR
#error "ATTUNE_KERNEL_DIR: the build's kernel folder must be defined"
#endif

extern char **environ;

namespace attune::tools {

std::string read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fail("{}: cannot be read ({})", path, std::strerror(errno));
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

void write_file(const std::string &path, const std::string &text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    file.close();
    if (!file) fail("{}: cannot be written", path);
}

std::string manifest_path() {
    const char *path = std::getenv("ATTUNE_MANIFEST");
    return path && *path ? path : ATTUNE_KERNEL_DIR "/manifest.json";
}

std::vector<ManifestPhase> manifest_phases(const std::string &path, const std::string &kernel) {
    if (!std::filesystem::exists(path))
        fail("{}: not there; expected the manifest that the build writes (build the kernels, or set ATTUNE_MANIFEST)",
             path);
    std::vector<ManifestPhase> phases;
    try {
        const auto kernels = nlohmann::json::parse(read_file(path));
        if (!kernels.contains(kernel))
            fail("{}: has no kernel {}; expected one that this build generated", path, kernel);
        for (const auto &j : kernels.at(kernel))
            phases.push_back({j.at("phase").get<std::string>(), j.value("generator", ""), j.value("function", ""),
                              j.at("command").get<std::vector<std::string>>()});
    } catch (const nlohmann::json::exception &e) {
        fail("{}: {}; expected {{NAME: [{{phase, generator, function, command}}]}}", path, e.what());
    }
    for (const auto &p : phases)
        if (p.command.empty()) fail("{}: kernel {}, phase {}: the command is empty", path, kernel, p.phase);
    return phases;
}

TemporaryFolder::TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "attune-XXXXXX").string();
    if (!mkdtemp(pattern.data())) fail("{}: a temporary folder cannot be made ({})", pattern, std::strerror(errno));
    path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

int run_program(const std::vector<std::string> &command, std::string &output) {
    const TemporaryFolder folder;
    const std::string log = folder.file("output");
    std::vector<char *> argv;
    argv.reserve(command.size() + 1);
    for (const std::string &word : command) argv.push_back(const_cast<char *>(word.c_str()));
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    pid_t child = 0;
    const int error = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) fail("{}: cannot be started ({})", command[0], std::strerror(error));
    int status = 0;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) fail("{}: waiting for it failed ({})", command[0], std::strerror(errno));
    output = read_file(log);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::string emit_artefact(const ManifestPhase &phase, const std::string &kind) {
    const TemporaryFolder folder;
    std::vector<std::string> command = phase.command;
    // The suffix matters: generators choose the format of some outputs by it.
    const std::string file = folder.file("artefact." + (kind == "asm" ? std::string("s") : kind));
    command.insert(command.end(), {"--emit", kind, "--output", file});
    std::string log;
    const int status = run_program(command, log);
    if (status != 0)
        fail("phase {}: the generator ended with status {}; expected 0\n  {}\n{}", phase.phase, status,
             fmt::join(command, " "), log);
    return read_file(file);
}

} // namespace attune::tools
