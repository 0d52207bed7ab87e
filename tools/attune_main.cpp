// attune: the command line. Parses, calls one command, turns errors into messages and exit statuses.
#include "commands.h"

#include "lib/error.h"
#include "lib/tune_store.h"

#include <algorithm>
#include <cstdio>
#include <exception>

namespace attune::tools {

void CommonOptions::add_to(CLI::App &command) {
    command.add_option("--case", case_texts, "A problem, e.g. f32:b1:h8:n1024:d64:causal (repeatable)")
        ->type_name("CASE")
        ->allow_extra_args(false);
    command.add_option("--strategy", strategies, "Only kernels of these strategies, e.g. flash,rowstrip")
        ->type_name("A,B")
        ->delimiter(',')
        ->allow_extra_args(false);
    command.add_option("--device", device, "cpu, opencl, vulkan or cuda (default cpu)")->type_name("NAME");
    command.add_option("--threads", threads, "Numbers of threads, e.g. 1,2 (default: all cores)")
        ->type_name("1,2")
        ->delimiter(',')
        ->allow_extra_args(false);
    command.add_option("--seed", seed, "Seed of the random inputs (default 0)")->type_name("N");
    command.add_option("--json", json, "Also write the results to this file")->type_name("FILE");
}

std::vector<Case> CommonOptions::cases() const {
    std::vector<Case> parsed;
    for (const std::string &text : case_texts) parsed.push_back(parse_case(text));
    for (const Case &c : parsed)
        for (int t : thread_counts()) load_tuned_for(c, t);
    return parsed;
}

void load_tuned_for(const Case &c, int threads) {
    for (const std::string &message : load_tuned({c}, {threads})) fmt::print(stderr, "attune: {}\n", message);
}

KernelFilter CommonOptions::filter() const {
    KernelFilter f;
    f.strategies = strategies;
    f.device = parse_device(device);
    f.check_names();
    return f;
}

std::vector<int> CommonOptions::thread_counts() const {
    for (int t : threads)
        if (t < 1 || t > 4096) fail("--threads={}: expected a number from 1 to 4096", t);
    return threads.empty() ? std::vector<int>{attune_get_num_threads()} : threads;
}

void CommonOptions::check_json() const {
    if (!json.empty()) check_writable(json);
}

} // namespace attune::tools

int main(int argc, char **argv) {
    using namespace attune::tools;
    install_interrupt_handler();
    CLI::App app{"attune: scaled dot-product attention from generated kernels.\n"
                 "Compare scheduling strategies on this machine, check kernels against float64, look inside them.",
                 "attune"};
    app.set_version_flag("--version", std::string("attune ") + attune_version());
    app.require_subcommand(1);
    app.footer("attune COMMAND --help tells more. \n\n" + case_syntax());
    Status status;
    add_compare(app, status);
    add_bench(app, status);
    add_explain(app, status);
    add_verify(app, status);
    add_info(app, status);
    add_onnx_attention(app, status);
    add_tune(app, status);
    add_build(app, status);
    add_worker(app, status);
    try {
        // CLI11 says no more than that a subcommand is required.
        std::vector<std::string> commands;
        for (const CLI::App *command : app.get_subcommands([](CLI::App *) { return true; }))
            if (!command->get_group().empty()) commands.push_back(command->get_name());
        if (argc > 1 && argv[1][0] != '-' && std::find(commands.begin(), commands.end(), argv[1]) == commands.end() &&
            std::string_view(argv[1]) != "worker")
            fail("{}: no such command; expected one of: {}", argv[1], fmt::join(commands, ", "));
        app.parse(argc, argv);
    } catch (const CLI::ParseError &e) {
        const int code = app.exit(e);
        return code == 0 ? 0 : 2;
    } catch (const Error &e) {
        fmt::print(stderr, "attune: {}\n", e.what());
        return 2;
    } catch (const std::bad_alloc &) {
        fmt::print(stderr, "attune: out of memory; expected a case whose arrays and workspace fit\n");
        return 2;
    } catch (const std::exception &e) {
        fmt::print(stderr, "attune: {}\n", e.what());
        return 2;
    }
    return std::fflush(stdout) == 0 ? status.code : 2;
}
