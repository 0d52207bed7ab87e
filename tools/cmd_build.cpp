// attune build: libraries from a catalogue: an archive with the runtime and the catalogue's kernels, and a plug-in for
// attune_load_kernels. The launcher hands this command on where its argument is a file.
#include "commands.h"

#include "lib/error.h"
#include "lib/manifest.h"
#include "lib/space.h"

#include <filesystem>

namespace attune::tools {

void add_build(CLI::App &app, Status &status) {
    struct Options {
        std::vector<std::string> files, score_mods, mask_mods;
        std::string output;
    };
    auto options = std::make_shared<Options>();
    CLI::App *command = app.add_subcommand("build", "A library of the kernels of a catalogue, e.g. of tune --export");
    command->add_option("FILE", options->files, "Catalogues (JSON)")->required()->type_name("");
    command->add_option("-o,--output", options->output, "The folder for lib/ and include/; its name is the library's")
        ->required()
        ->type_name("DIR");
    command
        ->add_option("--score-mod", options->score_mods,
                     "User functions of scores (docs/kernels.md), into all of the kernels")
        ->type_name("FILE");
    command->add_option("--mask-mod", options->mask_mods, "The same of masks")->type_name("FILE");
    command->callback([options, &status] {
        for (const std::string &file : options->files)
            if (!std::filesystem::exists(file)) fail("FILE={}: not there; expected a catalogue", file);
        const Toolchain t = find_toolchain();
        std::vector<std::string> arguments = {t.python, t.kernel_set, "--toolchain", t.path, "-o", options->output};
        for (const auto &[name, files] :
             {std::pair{"--score-mod", &options->score_mods}, {"--mask-mod", &options->mask_mods}})
            for (const std::string &file : *files) arguments.insert(arguments.end(), {name, file});
        arguments.insert(arguments.end(), options->files.begin(), options->files.end());
        std::string output;
        const int code = run_program(arguments, output);
        fmt::print(code == 0 ? stdout : stderr, "{}", output);
        status.code = code == 0 ? 0 : 2;
    });
}

} // namespace attune::tools
