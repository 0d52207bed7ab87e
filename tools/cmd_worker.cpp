// attune worker: a contestant of bench, or the candidates of tune, in a process of its own. Not for people: it is
// started by these commands, and talks JSON.
#include "commands.h"

#include "lib/error.h"
#include "lib/tune_worker.h"
#include "lib/worker.h"

namespace attune::tools {

void add_worker(CLI::App &app, Status &status) {
    struct Options {
        std::string contestant, library;
    };
    auto options = std::make_shared<Options>();
    CLI::App *command = app.add_subcommand("worker", "A part of bench or tune; started by it")->group("");
    command->add_option("contestant", options->contestant, "attune, openblas or tune")->required();
    command->add_option("--library", options->library, "OpenBLAS's library")->type_name("FILE");
    command->callback([options, &status] {
        if (options->contestant == "tune") {
            status.code = serve_tuning();
            return;
        }
        std::unique_ptr<WorkerContestant> contestant;
        if (options->contestant == "attune")
            contestant = make_attune_worker();
        else if (options->contestant == "openblas")
            contestant = make_openblas_worker(options->library);
        else
            fail("worker {}: unknown; expected attune, openblas or tune", options->contestant);
        status.code = serve(*contestant);
    });
}

} // namespace attune::tools
