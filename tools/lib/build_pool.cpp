#include "build_pool.h"

#include "manifest.h"

#include <atomic>
#include <filesystem>
#include <fmt/format.h>
#include <thread>
#include <unistd.h>

namespace attune::tools {

namespace fs = std::filesystem;

namespace {

// What export reads, beside the plug-in, and there before it is.
void describe(const BuildJob &job) {
    const std::string path = fs::path(job.library).replace_extension(".json");
    const std::string beside = fmt::format("{}.{}.tmp", path, getpid());
    fs::create_directories(fs::path(path).parent_path());
    write_file(beside, job.entry + "\n");
    fs::rename(beside, path);
}

} // namespace

BuildPool::BuildPool(const Toolchain &toolchain, int processes, double seconds_each)
    : toolchain_(toolchain), seconds_each_(seconds_each), servers_(size_t(processes)) {}

void BuildPool::build(std::vector<BuildJob *> jobs) {
    std::erase_if(jobs, [](const BuildJob *job) { return fs::exists(job->library); });
    std::atomic<bool> interrupted = false;
    while (!jobs.empty() && !interrupted) {
        // A child dies with the thread that started it, so that this thread starts them all; a server that was killed
        // over a candidate is started anew here, in the next turn.
        for (auto &server : servers_)
            if (!server || !server->alive())
                server =
                    std::make_unique<ChildProcess>(std::vector<std::string>{toolchain_.python, toolchain_.kernel_set,
                                                                            "--toolchain", toolchain_.path, "--serve"},
                                                   ChildProcess::Environment{});
        std::atomic<size_t> job = 0;
        std::vector<std::thread> threads;
        std::vector<char> done(jobs.size(), 0);
        for (auto &server : servers_)
            threads.emplace_back([&, s = server.get()] {
                while (s->alive() && !interrupted) {
                    const size_t i = job++;
                    if (i >= jobs.size()) return;
                    try {
                        const fs::path folder = fs::path(jobs[i]->library).parent_path();
                        describe(*jobs[i]);
                        const nlohmann::json answer = s->ask({{"op", "build"},
                                                              {"entry", jobs[i]->entry},
                                                              {"objects", (folder / "objects").string()},
                                                              {"library", jobs[i]->library}},
                                                             seconds_each_);
                        if (answer.contains("error")) jobs[i]->why_not = answer["error"];
                    } catch (const Interrupted &) {
                        interrupted = true;
                    } catch (const std::exception &e) {
                        jobs[i]->why_not = e.what();
                    }
                    done[i] = 1;
                }
            });
        for (std::thread &t : threads) t.join();
        // What nobody took, since all servers had died.
        std::vector<BuildJob *> left;
        for (size_t i = 0; i < jobs.size(); ++i)
            if (!done[i]) left.push_back(jobs[i]);
        jobs = std::move(left);
    }
    if (interrupted) throw Interrupted();
}

} // namespace attune::tools
