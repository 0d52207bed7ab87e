// attune worker: a contestant of bench in a process of its own. Not for people: it is started by bench, and talks JSON.
#include "commands.h"

#include "lib/error.h"
#include "lib/worker.h"

namespace attune::tools {

void add_worker(CLI::App &app, Status &status) {
    struct Options {
        std::string contestant, library;
    };
    auto options = std::make_shared<Options>();
    CLI::App *command = app.add_subcommand("worker", "A contestant of bench; started by it")->group("");
    command->add_option("contestant", options->contestant, "attune or openblas")->required();
    command->add_option("--library", options->library, "OpenBLAS's library")->type_name("FILE");
    command->callback([options, &status] {
        std::unique_ptr<WorkerContestant> contestant;
        if (options->contestant == "attune")
            contestant = make_attune_worker();
        else if (options->contestant == "openblas")
            contestant = make_openblas_worker(options->library);
        else
            fail("worker {}: unknown; expected attune or openblas", options->contestant);
        status.code = serve(*contestant);
    });
}

} // namespace attune::tools
