// Rows, files, tables, progress.
#include "results.h"

#include "error.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <fmt/chrono.h>
#include <sys/ioctl.h>
#include <unistd.h>

namespace attune::tools {
namespace {

using nlohmann::json;

// Set while a file is between its creation and its final name. The handler then only notes the signal.
std::atomic<bool> writing{false};
std::atomic<int> pending_signal{0};

// Set while a command wants to end in its own time: see DeferredInterrupts.
std::atomic<bool> deferring{false};
std::atomic<int> interrupt_pipe[2] = {-1, -1};
std::atomic<void (*)()> exit_hook{nullptr};

void end_at_once(int signal) {
    if (const auto hook = exit_hook.load()) hook();
    if (isatty(STDERR_FILENO)) {
        const char text[] = "\r\033[K";
        if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(128 + signal);
    }
    _exit(128 + signal);
}

extern "C" void on_interrupt(int signal) {
    const bool first = pending_signal.exchange(signal) == 0;
    if (deferring && first) {
        if (write(interrupt_pipe[1], "!", 1) < 0) _exit(128 + signal);
        return;
    }
    if (!writing) end_at_once(signal);
}

class WritingScope {
  public:
    WritingScope() { writing = true; }
    ~WritingScope() {
        writing = false;
        if (pending_signal && !deferring) end_at_once(pending_signal);
    }
};

template <typename T> json optional_json(const std::optional<T> &value) {
    // JSON has no infinity and no NaN; a missing number is null.
    if (!value) return nullptr;
    if constexpr (std::is_floating_point_v<T>)
        if (!std::isfinite(*value)) return nullptr;
    return *value;
}

json positive(double value) {
    return value > 0 ? json(value) : json(nullptr);
}

template <typename T> void read_optional(const json &row, const char *name, std::optional<T> &value) {
    if (row.contains(name) && !row.at(name).is_null()) value = row.at(name).get<T>();
}

std::string pad(const std::string &cell, int width, Table::Align align) {
    const std::string blanks(size_t(std::max(0, width - display_width(cell))), ' ');
    return align == Table::Align::left ? cell + blanks : blanks + cell;
}

} // namespace

json to_json(const Machine &machine, const std::string &isa, const Calibration &calibration,
             const std::vector<ResultRow> &rows) {
    json list = json::array();
    for (const ResultRow &r : rows) {
        json row = {{"case", r.case_text},
                    {"impl", r.impl},
                    {"kernel", r.kernel},
                    {"strategy", r.strategy},
                    {"dtype", r.dtype},
                    {"threads", r.threads},
                    {"median_s", optional_json(r.median_s)},
                    {"min_s", optional_json(r.min_s)},
                    {"p90_s", optional_json(r.p90_s)},
                    {"gflops", optional_json(r.gflops)},
                    {"pct_peak", optional_json(r.pct_peak)},
                    {"gbps", optional_json(r.gbps)},
                    {"peak_rss_bytes", optional_json(r.peak_rss_bytes)},
                    {"workspace_bytes", optional_json(r.workspace_bytes)},
                    {"allocs_per_call", optional_json(r.allocs_per_call)},
                    {"max_err", optional_json(r.max_err)},
                    {"err_bound", optional_json(r.err_bound)},
                    {"lse_err", optional_json(r.lse_err)},
                    {"lse_bound", optional_json(r.lse_bound)},
                    {"ok", r.ok},
                    {"why_not", r.why_not},
                    {"chosen", r.chosen},
                    {"input", r.input},
                    {"seed", r.seed}};
        // Only bench yields these.
        if (r.rss_growth_bytes) row["rss_growth_bytes"] = *r.rss_growth_bytes;
        if (r.peak_gflops) row["peak_gflops"] = optional_json(r.peak_gflops);
        if (r.read_gbps) row["read_gbps"] = optional_json(r.read_gbps);
        if (!r.how.empty()) row["how"] = r.how;
        if (!r.version.empty()) row["version"] = r.version;
        if (!r.phases.empty()) {
            json phases = json::array();
            for (const auto &[name, seconds] : r.phases) phases.push_back({{"name", name}, {"median_s", seconds}});
            row["phases"] = std::move(phases);
        }
        list.push_back(std::move(row));
    }
    return {{"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
            {"version", attune_version()},
            {"machine",
             {{"cpu", machine.cpu},
              {"isa", isa},
              {"cores", machine.cores},
              {"peak_gflops_f32", positive(calibration.peak_f32)},
              {"peak_gflops_bf16", positive(calibration.peak_bf16)},
              {"read_gbps", positive(calibration.read)}}},
            {"rows", std::move(list)}};
}

std::vector<ResultRow> rows_from_json(const json &file) {
    std::vector<ResultRow> rows;
    try {
        for (const json &j : file.at("rows")) {
            ResultRow r;
            r.case_text = j.at("case").get<std::string>();
            r.impl = j.at("impl").get<std::string>();
            r.kernel = j.at("kernel").get<std::string>();
            r.strategy = j.at("strategy").get<std::string>();
            r.dtype = j.at("dtype").get<std::string>();
            r.threads = j.at("threads").get<int>();
            r.ok = j.at("ok").get<bool>();
            r.why_not = j.value("why_not", "");
            r.chosen = j.value("chosen", false);
            r.input = j.value("input", "");
            r.seed = j.value("seed", uint64_t(0));
            read_optional(j, "median_s", r.median_s);
            read_optional(j, "min_s", r.min_s);
            read_optional(j, "p90_s", r.p90_s);
            read_optional(j, "gflops", r.gflops);
            read_optional(j, "pct_peak", r.pct_peak);
            read_optional(j, "gbps", r.gbps);
            read_optional(j, "peak_rss_bytes", r.peak_rss_bytes);
            read_optional(j, "workspace_bytes", r.workspace_bytes);
            read_optional(j, "allocs_per_call", r.allocs_per_call);
            read_optional(j, "rss_growth_bytes", r.rss_growth_bytes);
            read_optional(j, "peak_gflops", r.peak_gflops);
            read_optional(j, "read_gbps", r.read_gbps);
            r.how = j.value("how", "");
            r.version = j.value("version", "");
            read_optional(j, "max_err", r.max_err);
            read_optional(j, "err_bound", r.err_bound);
            read_optional(j, "lse_err", r.lse_err);
            read_optional(j, "lse_bound", r.lse_bound);
            if (j.contains("phases"))
                for (const json &phase : j.at("phases"))
                    r.phases.emplace_back(phase.at("name").get<std::string>(), phase.at("median_s").get<double>());
            rows.push_back(std::move(r));
        }
    } catch (const json::exception &e) {
        fail("result file: {}; expected {{\"machine\": {{…}}, \"rows\": [{{case, impl, kernel, …}}]}}", e.what());
    }
    return rows;
}

void check_writable(const std::string &path) {
    namespace fs = std::filesystem;
    std::error_code ignored;
    if (path.empty()) fail("--json: the file name is empty; expected a path");
    if (fs::is_directory(path, ignored)) fail("--json={}: is a folder; expected the path of a file", path);
    fs::path folder = fs::path(path).parent_path();
    if (folder.empty()) folder = ".";
    if (!fs::is_directory(folder, ignored))
        fail("--json={}: there is no folder {}; expected one", path, folder.string());
    if (access(folder.c_str(), W_OK) != 0)
        fail("--json={}: folder {} cannot be written to ({})", path, folder.string(), std::strerror(errno));
}

void write_json(const std::string &path, const json &value) {
    const std::string text = value.dump(1) + "\n";
    std::string temporary = fmt::format("{}.{}.json.tmp", path, getpid());
    const WritingScope scope;
    const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) fail("{}: cannot be created ({})", temporary, std::strerror(errno));
    size_t done = 0;
    while (done < text.size()) {
        const ssize_t n = write(file, text.data() + done, text.size() - done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        done += size_t(n);
    }
    const bool closed = close(file) == 0;
    if (done < text.size() || !closed || std::rename(temporary.c_str(), path.c_str()) != 0) {
        const std::string reason = std::strerror(errno);
        unlink(temporary.c_str());
        fail("{}: cannot be written ({})", path, reason);
    }
}

void install_interrupt_handler() {
    struct sigaction action {};
    action.sa_handler = on_interrupt;
    sigemptyset(&action.sa_mask);
    for (int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

void set_exit_hook(void (*hook)()) {
    exit_hook = hook;
}

DeferredInterrupts::DeferredInterrupts() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail("no pipe for Ctrl-C ({})", std::strerror(errno));
    for (int i = 0; i < 2; ++i) interrupt_pipe[i] = ends[i];
    deferring = true;
}

DeferredInterrupts::~DeferredInterrupts() {
    deferring = false;
    for (auto &end : interrupt_pipe) close(end.exchange(-1));
}

bool DeferredInterrupts::requested() {
    return deferring && pending_signal != 0;
}

int DeferredInterrupts::signal() {
    return pending_signal;
}

int DeferredInterrupts::fd() {
    return interrupt_pipe[0];
}

int display_width(std::string_view text) {
    int width = 0;
    for (size_t i = 0; i < text.size();) {
        const auto byte = static_cast<unsigned char>(text[i]);
        const size_t length = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
        uint32_t point = length == 1 ? byte : byte & (0x7fu >> length);
        for (size_t k = 1; k < length && i + k < text.size(); ++k)
            point = (point << 6) | (static_cast<unsigned char>(text[i + k]) & 0x3fu);
        i += length;
        const bool combining =
            (point >= 0x300 && point <= 0x36f) || (point >= 0x200b && point <= 0x200f) || point == 0xfeff;
        const bool wide = (point >= 0x1100 && point <= 0x115f) || (point >= 0x2e80 && point <= 0xa4cf) ||
                          (point >= 0xac00 && point <= 0xd7a3) || (point >= 0xf900 && point <= 0xfaff) ||
                          (point >= 0xfe30 && point <= 0xfe6f) || (point >= 0xff00 && point <= 0xff60) ||
                          (point >= 0x1f300 && point <= 0x1faff);
        width += combining ? 0 : wide ? 2 : 1;
    }
    return width;
}

std::string Table::text() const {
    std::vector<int> widths;
    for (const auto &[name, align] : columns_) widths.push_back(display_width(name));
    for (const Row &row : rows_)
        if (!row.note)
            for (size_t i = 0; i < row.cells.size() && i < widths.size(); ++i)
                widths[i] = std::max(widths[i], display_width(row.cells[i]));
    std::string out;
    const auto line = [&](const auto &cell) {
        std::string s;
        for (size_t i = 0; i < columns_.size(); ++i) s += (i ? "  " : "") + pad(cell(i), widths[i], columns_[i].second);
        s.erase(s.find_last_not_of(' ') + 1);
        out += s + "\n";
    };
    line([&](size_t i) { return columns_[i].first; });
    line([&](size_t i) {
        std::string rule;
        for (int k = 0; k < widths[i]; ++k) rule += "─";
        return rule;
    });
    for (const Row &row : rows_) {
        if (row.note)
            out += row.cells[0] + "\n";
        else
            line([&](size_t i) { return i < row.cells.size() ? row.cells[i] : std::string(); });
    }
    return out;
}

std::string format_seconds(double s) {
    if (!std::isfinite(s)) return "–";
    if (s < 1e-6) return fmt::format("{:.0f} ns", s * 1e9);
    if (s < 1e-3) return s < 1e-4 ? fmt::format("{:.2f} µs", s * 1e6) : fmt::format("{:.1f} µs", s * 1e6);
    if (s < 1) return s < 0.1 ? fmt::format("{:.2f} ms", s * 1e3) : fmt::format("{:.1f} ms", s * 1e3);
    return fmt::format("{:.2f} s", s);
}

std::string format_bytes(double b) {
    if (b < 1024) return fmt::format("{:.0f} B", b);
    if (b < 1024 * 1024) return fmt::format("{:.1f} KiB", b / 1024);
    if (b < 1024.0 * 1024 * 1024) return fmt::format("{:.1f} MiB", b / 1024 / 1024);
    return fmt::format("{:.2f} GiB", b / 1024 / 1024 / 1024);
}

std::string format_error(double e) {
    return e == 0 ? "0" : fmt::format("{:.1e}", e);
}

std::string bar(double share, int width) {
    static const char *const kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    const int eighths = int(std::lround(std::clamp(share, 0.0, 1.0) * width * 8));
    std::string s;
    for (int i = 0; i < eighths / 8; ++i) s += "█";
    s += kEighths[eighths % 8];
    for (int i = (eighths + 7) / 8; i < width; ++i) s += "·";
    return s;
}

Progress::Progress(std::string label, double total)
    : label_(std::move(label)), total_(total), terminal_(isatty(STDERR_FILENO) == 1),
      start_(std::chrono::steady_clock::now()), last_(start_) {}

void Progress::update(double done, std::string_view note) {
    if (!terminal_) return;
    using namespace std::chrono_literals;
    const auto now = std::chrono::steady_clock::now();
    if (now - start_ < 1s || now - last_ < 100ms) return;
    last_ = now;
    shown_ = true;
    winsize size{};
    const int columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
    const double share = total_ > 0 ? done / total_ : 0;
    std::string line =
        fmt::format("{} {} {:3.0f} %  {}", label_, bar(share, 24), 100 * std::clamp(share, 0.0, 1.0), note);
    while (display_width(line) >= columns && !line.empty()) { // whole characters: drop continuation bytes too
        while ((static_cast<unsigned char>(line.back()) & 0xc0) == 0x80) line.pop_back();
        line.pop_back();
    }
    fmt::print(stderr, "\r\033[K{}", line);
    std::fflush(stderr);
}

void Progress::finish() {
    if (shown_) {
        fmt::print(stderr, "\r\033[K");
        std::fflush(stderr);
    }
    shown_ = false;
}

} // namespace attune::tools
