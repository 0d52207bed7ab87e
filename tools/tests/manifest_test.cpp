// The manifest of generated kernels, and running the program that it names.
#include "lib/error.h"
#include "lib/manifest.h"

#include <filesystem>
#include <gtest/gtest.h>

namespace attune::tools {
namespace {

std::string error_of(const std::string &path, const std::string &kernel) {
    try {
        manifest_phases(path, kernel);
    } catch (const Error &e) {
        return e.what();
    }
    return "no error";
}

TEST(Manifest, PhasesOfAKernel) {
    const TemporaryFolder folder;
    const std::string path = folder.file("manifest.json");
    write_file(path,
               R"({"k": [{"phase": "pack", "generator": "pack_keys", "function": "f", "command": ["gen", "pack_keys"]},
                               {"phase": "main", "generator": "attend", "function": "g", "command": ["gen", "attend"]}]})");
    const auto phases = manifest_phases(path, "k");
    ASSERT_EQ(phases.size(), 2u);
    EXPECT_EQ(phases[0].phase, "pack");
    EXPECT_EQ(phases[1].command, (std::vector<std::string>{"gen", "attend"}));
    EXPECT_NE(error_of(path, "other").find("has no kernel other"), std::string::npos);
    EXPECT_NE(error_of(folder.file("none.json"), "k").find("not there"), std::string::npos);
    write_file(path, R"({"k": [{"phase": "pack"}]})");
    EXPECT_NE(error_of(path, "k").find("command"), std::string::npos);
    write_file(path, "{");
    EXPECT_NE(error_of(path, "k").find("parse error"), std::string::npos);
}

TEST(Manifest, EmittingRunsTheCommandWithTwoMoreOptions) {
    // A command that writes its arguments to the file after --output.
    const ManifestPhase phase{"main", "g", "f", {"sh", "-c", "printf '%s|' \"$@\" > \"$5\"", "sh", "one two"}};
    const std::string text = emit_artefact(phase, "stmt");
    EXPECT_EQ(text.rfind("one two|--emit|stmt|--output|", 0), 0u) << text;
}

TEST(Manifest, AFailingGeneratorIsAMessageWithItsOutput) {
    try {
        emit_artefact({"main", "g", "f", {"sh", "-c", "echo no such knob >&2; exit 3"}}, "asm");
        FAIL() << "no error";
    } catch (const Error &e) {
        const std::string message = e.what();
        EXPECT_NE(message.find("status 3"), std::string::npos) << message;
        EXPECT_NE(message.find("no such knob"), std::string::npos) << message;
    }
    EXPECT_THROW(emit_artefact({"main", "g", "f", {"/no/such/program"}}, "asm"), Error);
}

TEST(TemporaryFolder, IsRemoved) {
    std::string path;
    {
        const TemporaryFolder folder;
        path = folder.file("x");
        write_file(path, "text");
        EXPECT_EQ(read_file(path), "text");
    }
    EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(path).parent_path()));
}

} // namespace
} // namespace attune::tools
