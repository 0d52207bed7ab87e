// Rows, the JSON file, tables.
#include "lib/error.h"
#include "lib/results.h"

#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <limits>
#include <set>
#include <sstream>
#include <unistd.h>

namespace attune::tools {
namespace {

namespace fs = std::filesystem;

struct Folder {
    fs::path path = fs::temp_directory_path() / ("attune-results-" + std::to_string(getpid()));
    Folder() { fs::create_directories(path); }
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
};

ResultRow sample_row() {
    ResultRow r;
    r.case_text = "f32:b1:h8:n1024:d64";
    r.kernel = "attn_flash_f32_d64_avx512_q24k192";
    r.strategy = "flash";
    r.dtype = "f32";
    r.threads = 2;
    r.median_s = 1.25e-3;
    r.min_s = 1.2e-3;
    r.p90_s = 1.5e-3;
    r.gflops = 190.5;
    r.pct_peak = 81.25;
    r.gbps = 3.5;
    r.peak_rss_bytes = 12345678;
    r.workspace_bytes = 4096;
    r.allocs_per_call = 0;
    r.max_err = 3e-7;
    r.err_bound = 1e-6;
    r.ok = true;
    r.chosen = true;
    r.seed = 7;
    r.phases = {{"pack", 1e-4}, {"main", 1.1e-3}};
    return r;
}

TEST(Json, HasTheFieldsThatOthersReadAndRoundTrips) {
    Machine machine;
    machine.cpu = "a CPU";
    machine.cores = 2;
    Calibration calibration{234, 468, 40};
    ResultRow failed;
    failed.case_text = "f32:b1:h1:n4:d8";
    failed.strategy = "split_kv";
    failed.why_not = "no kernel for d 8";
    failed.max_err = std::numeric_limits<double>::infinity();
    const auto json = nlohmann::json::parse(to_json(machine, "avx512", calibration, {sample_row(), failed}).dump());

    std::set<std::string> machine_keys, row_keys;
    for (const auto &[key, value] : json.at("machine").items()) machine_keys.insert(key);
    for (const auto &[key, value] : json.at("rows").at(0).items()) row_keys.insert(key);
    EXPECT_EQ(machine_keys,
              (std::set<std::string>{"cpu", "isa", "cores", "peak_gflops_f32", "peak_gflops_bf16", "read_gbps"}));
    for (const char *key :
         {"case", "impl", "kernel", "strategy", "dtype", "threads", "median_s", "min_s", "p90_s", "gflops", "pct_peak",
          "gbps", "peak_rss_bytes", "workspace_bytes", "allocs_per_call", "max_err", "err_bound", "ok", "why_not"})
        EXPECT_TRUE(row_keys.count(key)) << key;
    EXPECT_EQ(json["rows"][0]["impl"], "attune");
    EXPECT_EQ(json["rows"][0]["pct_peak"], 81.25);
    EXPECT_TRUE(json["rows"][1]["median_s"].is_null());
    EXPECT_TRUE(json["rows"][1]["max_err"].is_null()); // JSON has no infinity
    EXPECT_EQ(json["rows"][1]["ok"], false);

    const auto rows = rows_from_json(json);
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0].median_s, 1.25e-3);
    EXPECT_EQ(rows[0].peak_rss_bytes, 12345678);
    EXPECT_EQ(rows[0].phases, sample_row().phases);
    EXPECT_FALSE(rows[1].median_s);
    EXPECT_EQ(rows[1].why_not, "no kernel for d 8");
}

TEST(Json, BrokenFilesAreMessages) {
    for (const char *text :
         {"{}", R"({"rows": 3})", R"({"rows": [{"case": 1}]})", R"({"rows": [{"case": "x", "impl": "attune"}]})"})
        EXPECT_THROW(rows_from_json(nlohmann::json::parse(text)), Error) << text;
}

TEST(File, IsWholeAndLeavesNoTemporaryFile) {
    const Folder folder;
    const std::string path = folder.path / "result.json";
    write_json(path, {{"a", 1}});
    write_json(path, {{"a", 2}}); // replaces
    std::ifstream file(path);
    EXPECT_EQ(nlohmann::json::parse(file).at("a"), 2);
    int files = 0;
    for ([[maybe_unused]] const auto &entry : fs::directory_iterator(folder.path)) ++files;
    EXPECT_EQ(files, 1);
}

TEST(File, WhatCannotBeWrittenIsSaidBeforehand) {
    const Folder folder;
    EXPECT_THROW(check_writable(folder.path / "nowhere" / "x.json"), Error);
    EXPECT_THROW(check_writable(folder.path), Error);
    EXPECT_THROW(check_writable(""), Error);
    EXPECT_NO_THROW(check_writable(folder.path / "x.json"));
    EXPECT_THROW(write_json(folder.path / "nowhere" / "x.json", 1), Error);
}

TEST(Width, CountsColumns) {
    EXPECT_EQ(display_width("abc"), 3);
    EXPECT_EQ(display_width("µs – ◀"), 6);
    EXPECT_EQ(display_width("e\u0301"), 1); // an accent combines
    EXPECT_EQ(display_width("注意"), 4);
    EXPECT_EQ(display_width("█▌"), 2);
}

TEST(Table, AlignsWhateverTheBytes) {
    Table table({{"name", Table::Align::left}, {"time", Table::Align::right}});
    table.add({"µ", "1.00 µs"});
    table.add({"longer", "12 s"});
    table.add_note("a note that is longer than all columns together");
    EXPECT_EQ(table.text(), "name       time\n"
                            "──────  ───────\n"
                            "µ       1.00 µs\n"
                            "longer     12 s\n"
                            "a note that is longer than all columns together\n");
}

TEST(Format, Units) {
    EXPECT_EQ(format_seconds(0.00123), "1.23 ms");
    EXPECT_EQ(format_seconds(12.5e-6), "12.50 µs");
    EXPECT_EQ(format_seconds(2.5), "2.50 s");
    EXPECT_EQ(format_bytes(512), "512 B");
    EXPECT_EQ(format_bytes(1536), "1.5 KiB");
    EXPECT_EQ(format_bytes(128.0 * 1024 * 1024), "128.0 MiB");
    EXPECT_EQ(format_error(0), "0");
    EXPECT_EQ(format_error(1.25e-7), "1.2e-07");
    EXPECT_EQ(bar(0, 4), "····");
    EXPECT_EQ(bar(1, 4), "████");
    EXPECT_EQ(bar(0.5, 3), "█▌·");
    EXPECT_EQ(bar(7, 2), "██");
}

} // namespace
} // namespace attune::tools
