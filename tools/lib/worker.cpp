// The loop of questions, and attune's own worker.
#include "worker.h"

#include "bench.h"
#include "error.h"
#include "machine.h"
#include "numbers.h"
#include "results.h"
#include "runner.h"
#include "tune_store.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <iostream>
#include <sys/mman.h>
#include <unistd.h>

namespace attune::tools {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Arrays made from the seed must be those that the other contestants read from the file.
void compare_with_file(const attune_tensor &t, const std::string &name, const json &arrays) {
    if (!arrays.contains(name)) return;
    const std::string path = arrays[name].get<std::string>();
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) fail("{}: cannot be opened ({})", path, std::strerror(errno));
    const size_t bytes = size_t(lseek(file, 0, SEEK_END));
    void *data = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (data == MAP_FAILED) fail("{}: cannot be mapped ({})", path, std::strerror(errno));
    const bool equal = std::memcmp(data, t.data, bytes) == 0;
    munmap(data, std::max<size_t>(bytes, 1));
    if (!equal)
        fail("array {} differs from the one in the shared file; expected the same numbers from the same seed", name);
}

void write_output(const attune_tensor &o, const std::string &path) {
    std::vector<float> dense;
    dense.reserve(size_t(o.shape[0] * o.shape[1] * o.shape[2] * o.shape[3]));
    for (int64_t b = 0; b < o.shape[0]; ++b)
        for (int64_t h = 0; h < o.shape[1]; ++h)
            for (int64_t s = 0; s < o.shape[2]; ++s)
                for (int64_t d = 0; d < o.shape[3]; ++d)
                    dense.push_back(load_element(
                        o.data, o.dtype, b * o.stride[0] + h * o.stride[1] + s * o.stride[2] + d * o.stride[3]));
    std::ofstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.write(reinterpret_cast<const char *>(dense.data()), std::streamsize(dense.size() * sizeof(float)));
    if (!file.flush()) fail("{}: cannot be written", path);
}

class AttuneWorker : public WorkerContestant {
  public:
    std::string version() const override { return attune_version(); }

    json prepare(int threads) override {
        std::string why;
        tensors_.clear();
        load_tuned({copies_[0]->input_case()}, {threads});
        plan_ = make_plan(copies_[0]->problem(), "", "", threads, why);
        if (!plan_) return {{"cannot", first_line(why)}};
        const size_t bytes = attune_plan_workspace(plan_.get());
        workspace_ = Buffer(bytes, Guard::none);
        for (const auto &copy : copies_) {
            tensors_.push_back(copy->tensors());
            tensors_.back().lse = nullptr; // no peer is asked for it
        }
        const char *name = attune_plan_kernel(plan_.get());
        const attune_kernel *kernel = attune_find_kernel(name);
        json answer = {
            {"ok", true}, {"kernel", name}, {"strategy", kernel ? kernel->strategy : ""}, {"workspace", bytes}};
        measure_memory(answer);
        return answer;
    }

    void call(size_t copy) override {
        if (attune_run(plan_.get(), &tensors_[copy], workspace_.data(), workspace_.size()) != ATTUNE_OK)
            fail("{}", attune_last_error());
    }

  private:
    Plan plan_;
    Buffer workspace_;
    std::vector<attune_tensors> tensors_;
};

} // namespace

void WorkerContestant::measure_memory(json &answer) {
    const int64_t before = resident_bytes();
    reset_peak_rss();
    for (size_t copy = 0; copy < copies_.size(); ++copy) call(copy);
    const int64_t peak = peak_rss();
    answer["peak"] = peak;
    answer["growth"] = std::max<int64_t>(peak - before, 0);
}

int answer_questions(const std::function<json(const json &)> &answer) {
    signal(SIGINT, SIG_IGN); // the other side decides when to end
    // What is printed by accident must not get into the conversation.
    const int out = dup(STDOUT_FILENO);
    dup2(STDERR_FILENO, STDOUT_FILENO);
    for (std::string line; std::getline(std::cin, line);) {
        json reply;
        try {
            const json message = json::parse(line);
            if (message.value("op", "") == "quit") break;
            reply = answer(message);
        } catch (const std::exception &e) {
            reply = {{"error", first_line(e.what())}};
        }
        const std::string text = reply.dump() + "\n";
        if (write(out, text.data(), text.size()) != ssize_t(text.size())) return 1;
    }
    return 0;
}

int serve(WorkerContestant &contestant) {
    const Machine machine = detect_machine();
    auto &copies = contestant.copies_;
    size_t next = 0;
    const auto call = [&](int64_t times) {
        for (int64_t i = 0; i < times; ++i, next = (next + 1) % copies.size()) contestant.call(next);
    };
    const auto answer = [&](const json &m) -> json {
        const std::string op = m.at("op");
        if (op == "hello") return {{"version", contestant.version()}};
        if (op == "prepare") {
            copies.clear();
            next = 0;
            const Case c = parse_case(m.at("case").get<std::string>());
            InputOptions options;
            options.seed = m.at("seed");
            options.huge_pages = true;
            for (int i = 0; i < m.at("copies").get<int>(); ++i) {
                copies.push_back(std::make_unique<Inputs>(c, options));
                copies.back()->reset_outputs();
                if (c.layout != Layout::bhsd) continue;
                const attune_tensors &t = copies.back()->tensors();
                compare_with_file(t.q, "q", m.at("arrays"));
                compare_with_file(t.k, "k", m.at("arrays"));
                compare_with_file(t.v, "v", m.at("arrays"));
            }
            contestant.threads_ = m.at("threads");
            return contestant.prepare(contestant.threads_);
        }
        if (copies.empty()) fail("'{}' before 'prepare'", op);
        if (op == "check") {
            next = 0;
            copies[0]->reset_outputs();
            call(1);
            write_output(copies[0]->tensors().o, m.at("output"));
            return {{"ok", true}};
        }
        if (op == "run") {
            // Two warm calls at least, and two milliseconds of them: the process has just been stopped.
            const auto warm = Clock::now();
            for (int done = 0; done < m.value("warm", 2) || (seconds_since(warm) < 2e-3 && done < 1000); ++done)
                call(1);
            const auto start = Clock::now();
            call(m.at("calls"));
            return {{"seconds", seconds_since(start)}};
        }
        if (op == "allocations") {
            if (!AllocationCounter::available()) return {{"count", nullptr}};
            const int64_t calls = m.at("calls");
            const AllocationCounter counter;
            call(calls);
            const int64_t count = counter.count(); // the answer's own come after it
            return {{"count", count}};
        }
        if (op == "read") {
            std::vector<std::span<const std::byte>> parts;
            for (const auto &copy : copies)
                for (const attune_tensor *t : {&copy->tensors().k, &copy->tensors().v})
                    parts.emplace_back(static_cast<const std::byte *>(t->data),
                                       size_t(t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]) *
                                           dtype_size(t->dtype));
            return {{"gbps", measure_read_gbps(machine, contestant.threads_, parts)}};
        }
        fail("op '{}': unknown", op);
    };
    return answer_questions(answer);
}

std::unique_ptr<WorkerContestant> make_attune_worker() {
    return std::make_unique<AttuneWorker>();
}

} // namespace attune::tools
