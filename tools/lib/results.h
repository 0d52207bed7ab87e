// What a measurement or a check yields, as a row; the JSON file of such rows that every tool reads and writes; tables
// for the terminal; a progress bar.
#pragma once

#include "machine.h"

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attune::tools {

struct ResultRow {
    std::string case_text, impl = "attune", kernel, strategy, dtype;
    int threads = 0;
    // Times are missing in rows that only checked, and in those that did not run.
    std::optional<double> median_s, min_s, p90_s, gflops, pct_peak, gbps;
    std::optional<int64_t> peak_rss_bytes, workspace_bytes;
    std::optional<double> allocs_per_call;
    std::optional<int64_t> rss_growth_bytes;      // of the process's peak over what it held before its first call
    std::optional<double> peak_gflops, read_gbps; // calibrated around this row's measurement
    std::optional<double> max_err, err_bound, lse_err, lse_bound;
    bool ok = false;
    std::string why_not; // why it is not ok, or did not run
    bool chosen = false; // by a plan that is free to choose
    std::string how;     // which of several ways to call a peer was the fastest
    std::string version; // of a peer
    std::string input;   // "seed 0", or which file Q, K and V are from
    uint64_t seed = 0;
    std::vector<std::pair<std::string, double>> phases; // name, median seconds
};

struct Calibration {
    double peak_f32 = 0, peak_bf16 = 0, read = 0; // of all cores; 0: not measured
};

nlohmann::json to_json(const Machine &machine, const std::string &isa, const Calibration &calibration,
                       const std::vector<ResultRow> &rows);
// Throws Error if the JSON is not such a file.
std::vector<ResultRow> rows_from_json(const nlohmann::json &file);

// Throws Error now rather than after a long run if `path` cannot be written.
void check_writable(const std::string &path);
// The whole file or nothing: to a temporary file beside it, then renamed. Ctrl-C waits until that is done.
void write_json(const std::string &path, const nlohmann::json &value);

// Ctrl-C (and SIGTERM): leaves the terminal in order, leaves no half-written file, and ends with status 130 (143).
void install_interrupt_handler();
// Called by the handler before the process ends at once. Only what is safe there.
void set_exit_hook(void (*hook)());

// While an object of this class lives, the first Ctrl-C only makes requested() true and fd() readable; the second one
// ends the process as usual. For commands that keep what they know so far.
class DeferredInterrupts {
  public:
    DeferredInterrupts();
    ~DeferredInterrupts();
    DeferredInterrupts(const DeferredInterrupts &) = delete;
    DeferredInterrupts &operator=(const DeferredInterrupts &) = delete;
    static bool requested();
    static int signal(); // 0: none
    static int fd();     // -1 where no such object lives
};

// Columns on a terminal, counted, not bytes: accents combine, and wide characters take two.
int display_width(std::string_view text);

class Table {
  public:
    enum class Align { left, right };
    explicit Table(std::vector<std::pair<std::string, Align>> columns) : columns_(std::move(columns)) {}
    void add(std::vector<std::string> cells) { rows_.push_back({std::move(cells), false}); }
    // A line of text across all columns.
    void add_note(std::string text) { rows_.push_back({{std::move(text)}, true}); }
    size_t size() const { return rows_.size(); }
    std::string text() const;

  private:
    struct Row {
        std::vector<std::string> cells;
        bool note;
    };
    std::vector<std::pair<std::string, Align>> columns_;
    std::vector<Row> rows_;
};

std::string format_seconds(double seconds); // "1.23 ms"
std::string format_bytes(double bytes);     // "1.5 MiB"
std::string format_error(double error);     // "1.2e-07"
std::string bar(double share, int width);   // "█████▌    "

// A bar on stderr, if that is a terminal and the work takes longer than a second or so. Erased at the end.
class Progress {
  public:
    Progress(std::string label, double total);
    ~Progress() { finish(); }
    Progress(const Progress &) = delete;
    Progress &operator=(const Progress &) = delete;
    void update(double done, std::string_view note = {});
    void finish();

  private:
    std::string label_;
    double total_;
    bool terminal_, shown_ = false;
    std::chrono::steady_clock::time_point start_, last_;
};

} // namespace attune::tools
