// Shared inputs, and the questions to contestants in other processes.
#include "remote.h"

#include "bench.h"
#include "case.h"
#include "error.h"
#include "inputs.h"
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace attune::tools {
namespace {

using nlohmann::json;

// The tensor's elements, one after the other, whatever its strides; extents of stride 0 only once.
std::vector<std::byte> dense_copy(const attune_tensor &t) {
    const size_t size = dtype_size(t.dtype);
    int64_t extent[4];
    for (int i = 0; i < 4; ++i) extent[i] = t.stride[i] == 0 ? std::min<int64_t>(t.shape[i], 1) : t.shape[i];
    std::vector<std::byte> out(size_t(extent[0] * extent[1] * extent[2] * extent[3]) * size);
    std::byte *to = out.data();
    const auto *from = static_cast<const std::byte *>(t.data);
    for (int64_t b = 0; b < extent[0]; ++b)
        for (int64_t h = 0; h < extent[1]; ++h)
            for (int64_t s = 0; s < extent[2]; ++s)
                for (int64_t d = 0; d < extent[3]; ++d, to += size)
                    std::memcpy(
                        to, from + size_t(b * t.stride[0] + h * t.stride[1] + s * t.stride[2] + d * t.stride[3]) * size,
                        size);
    return out;
}

json problem_json(const Case &c) {
    std::vector<int64_t> offsets;
    for (int64_t b = 0; b < c.B; ++b) offsets.push_back(offset_of(c, b));
    return {{"dtype", dtype_name(c.dtype)},
            {"kv_dtype", dtype_name(c.kv_dtype)},
            {"B", c.B},
            {"Hq", c.Hq},
            {"Hkv", c.Hkv},
            {"N", c.N},
            {"M", c.M},
            {"dk", c.dk},
            {"dv", c.dv},
            {"scale", c.scale ? double(*c.scale) : 1 / std::sqrt(double(c.dk))},
            {"default_scale", !c.scale},
            {"softcap", c.softcap ? double(*c.softcap) : 0.0},
            {"causal", c.causal != Causal::none},
            {"offset", offsets},
            {"window", {c.window_left, c.window_right}},
            {"kv_len", c.kv_len.empty() ? json(nullptr) : json(c.kv_len)},
            {"sink", c.sink}};
}

} // namespace

SharedFile::SharedFile(size_t bytes) : size_(std::max<size_t>(bytes, 1)) {
    file_ = memfd_create("attune-case", MFD_CLOEXEC);
    if (file_ < 0 || ftruncate(file_, off_t(size_)) != 0)
        fail("no shared memory of {} ({})", format_bytes(double(size_)), std::strerror(errno));
    data_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (data_ == MAP_FAILED) fail("no shared memory of {} ({})", format_bytes(double(size_)), std::strerror(errno));
}

SharedFile::~SharedFile() {
    if (data_ && data_ != MAP_FAILED) munmap(data_, size_);
    if (file_ >= 0) close(file_);
}

std::string SharedFile::path() const {
    return fmt::format("/proc/{}/fd/{}", getpid(), file_);
}

bool reads_memory(const Case &c) {
    // Cores do some 5 operations in the time of reading a byte; at 8 the units begin to count.
    return c.M >= 16 * c.N && useful_flops(c) < 8 * least_bytes(c);
}

int copies_needed(const Case &c, const Machine &machine) {
    if (!reads_memory(c)) return 1;
    const double l3 = machine.l3 > 0 ? double(machine.l3) : double(32 << 20);
    const double bytes = double(c.B * c.Hkv * c.M) * double(c.dk + c.dv) * double(dtype_size(c.kv_dtype));
    return int(std::clamp(std::ceil(4 * l3 / std::max(bytes, 1.0)), 1.0, 4096.0));
}

SharedCase::SharedCase(const Inputs &inputs, uint64_t seed, int copies) : copies_(copies) {
    const Case &c = inputs.input_case();
    const attune_tensors &t = inputs.tensors();
    json arrays = json::object();
    const auto share = [&](const char *name, const std::vector<std::byte> &bytes) {
        files_.push_back(std::make_unique<SharedFile>(bytes.size()));
        std::memcpy(files_.back()->data(), bytes.data(), bytes.size());
        arrays[name] = files_.back()->path();
    };
    share("q", dense_copy(t.q));
    share("k", dense_copy(t.k));
    share("v", dense_copy(t.v));
    if (t.mask) share("mask", dense_copy(*t.mask));
    if (t.bias) share("bias", dense_copy(*t.bias));
    if (t.alibi_slopes) {
        const auto *from = reinterpret_cast<const std::byte *>(t.alibi_slopes);
        share("slopes", {from, from + c.Hq * 4});
    }
    output_ = std::make_unique<SharedFile>(size_t(c.B * c.Hq * c.N * c.dv) * 4);
    message_ = {{"op", "prepare"},  {"case", to_string(c)}, {"seed", seed}, {"problem", problem_json(c)},
                {"arrays", arrays}, {"copies", copies}};
}

json SharedCase::prepare_message(int threads) const {
    json message = message_;
    message["threads"] = threads;
    return message;
}

std::optional<json> Remote::ask(const json &message, double limit, ResultRow &row) {
    const auto wrong = [&row](const std::string &why) {
        row.ok = false;
        if (row.why_not.empty()) row.why_not = why;
    };
    try {
        process_->resume();
        json answer = process_->ask(message, limit);
        process_->stop();
        if (answer.contains("error")) {
            wrong(answer["error"].get<std::string>());
            return {};
        }
        return answer;
    } catch (const ChildError &e) {
        wrong(e.what());
    } catch (const json::exception &e) {
        wrong(fmt::format("answered nonsense: {}", e.what()));
    }
    if (!process_->alive()) process_.reset();
    return {};
}

bool Remote::start(ResultRow &row) {
    if (process_ && process_->alive()) return true;
    try {
        process_ = std::make_unique<ChildProcess>(spec_.command, spec_.environment);
    } catch (const ChildError &e) {
        row.ok = false;
        row.why_not = e.what();
        return false;
    }
    const auto answer = ask({{"op", "hello"}}, limits_.start, row);
    if (!answer) {
        process_.reset();
        return false;
    }
    version_ = answer->value("version", "");
    return true;
}

bool Remote::prepare(const SharedCase &shared, int threads, ResultRow &row) {
    if (!spec_.missing.empty()) {
        row.ok = false;
        row.why_not = spec_.missing;
        return false;
    }
    if (!start(row)) return false;
    row.version = version_;
    const auto answer = ask(shared.prepare_message(threads), limits_.prepare, row);
    if (!answer) return false;
    if (answer->contains("cannot")) {
        row.ok = false;
        row.why_not = (*answer)["cannot"].get<std::string>();
        return false;
    }
    row.how = answer->value("how", "");
    row.kernel = answer->value("kernel", row.kernel);
    row.strategy = answer->value("strategy", row.strategy);
    if (answer->contains("workspace")) row.workspace_bytes = (*answer)["workspace"].get<int64_t>();
    if (answer->contains("peak")) row.peak_rss_bytes = (*answer)["peak"].get<int64_t>();
    if (answer->contains("growth")) row.rss_growth_bytes = (*answer)["growth"].get<int64_t>();
    estimate_ = 0; // not known yet
    return true;
}

bool Remote::check(const SharedCase &shared, const Reference &reference, attune_tensors outputs, bool first,
                   ResultRow &row) {
    const SharedFile &file = shared.output();
    std::memset(file.data(), 0xff, file.size()); // NaN
    if (!ask({{"op", "check"}, {"output", file.path()}}, limits_.prepare, row)) return false;
    const attune_problem &p = reference.problem;
    outputs.o.data = file.data();
    outputs.o.dtype = ATTUNE_F32; // workers widen
    const int64_t dense[4] = {p.Hq * p.N * p.dv, p.N * p.dv, p.dv, 1};
    std::copy(dense, dense + 4, outputs.o.stride);
    outputs.lse = nullptr;
    const Verdict verdict = check_outputs(reference, outputs);
    if (first || verdict.o_error > row.max_err.value_or(0)) {
        row.max_err = verdict.o_error;
        row.err_bound = verdict.o_bound;
    }
    if (!verdict.ok && row.why_not.empty()) row.why_not = verdict.why;
    row.ok = row.ok && verdict.ok;
    return true;
}

bool Remote::count_allocations(ResultRow &row) {
    constexpr int calls = 2;
    const auto answer = ask({{"op", "allocations"}, {"calls", calls}}, limits_.prepare, row);
    if (!answer) return false;
    if (const auto count = answer->find("count"); count != answer->end() && count->is_number())
        row.allocs_per_call = count->get<double>() / calls;
    return true;
}

std::optional<double> Remote::timed(int calls, ResultRow &row) {
    // A call that takes many times what it took before is as good as a hang.
    const double limit = estimate_ > 0 ? limits_.call + 20 * estimate_ * (calls + 2) : limits_.prepare;
    const auto answer = ask({{"op", "run"}, {"calls", calls}, {"warm", 2}}, limit, row);
    if (!answer) return {};
    const double seconds = answer->value("seconds", 0.0);
    estimate_ = seconds / calls;
    return seconds;
}

std::optional<double> Remote::read_gbps(ResultRow &row) {
    const auto answer = ask({{"op", "read"}}, limits_.call, row);
    if (!answer) return {};
    return answer->value("gbps", 0.0);
}

} // namespace attune::tools
