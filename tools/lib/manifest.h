// How to get a kernel's loop nest, lowered statement or assembly: the build leaves a manifest that says, for each
// kernel and phase, which command of the generator program made it; the same command with --emit writes the text.
//
//   {"attn_flash_…": [{"phase": "main", "generator": "flash_attend", "function": "…", "command":
//   ["…/attune-halide-gen", …]}, …]}
#pragma once

#include <string>
#include <vector>

namespace attune::tools {

struct ManifestPhase {
    std::string phase, generator, function;
    std::vector<std::string> command;
};

// The phases of one kernel. Throws Error that names the file if it is missing, broken, or has no such kernel.
std::vector<ManifestPhase> manifest_phases(const std::string &path, const std::string &kernel);

// Default place: ATTUNE_MANIFEST in the environment, else manifest.json in the build's kernel folder.
std::string manifest_path();

// Runs phase.command with "--emit kind --output FILE"; returns the text. kind: schedule, stmt or asm.
std::string emit_artefact(const ManifestPhase &phase, const std::string &kind);

// Runs a program, without a shell. Returns its exit status; what it wrote to stdout and stderr goes to `output`.
int run_program(const std::vector<std::string> &command, std::string &output);

// A folder of its own under $TMPDIR, removed with all that is in it.
class TemporaryFolder {
  public:
    TemporaryFolder();
    ~TemporaryFolder();
    TemporaryFolder(const TemporaryFolder &) = delete;
    TemporaryFolder &operator=(const TemporaryFolder &) = delete;
    std::string file(const std::string &name) const { return path_ + "/" + name; }

  private:
    std::string path_;
};

std::string read_file(const std::string &path);
void write_file(const std::string &path, const std::string &text);

} // namespace attune::tools
