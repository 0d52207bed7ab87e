#include "tune_store.h"

#include "error.h"
#include "manifest.h"
#include "results.h"

#include "attune/kernel.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <sys/file.h>
#include <unistd.h>

namespace attune::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using rt::TuningEntry;

std::string subfolder(const std::string &name) {
    const std::string root = rt::cache_folder();
    if (root.empty()) fail("neither XDG_CACHE_HOME nor HOME is a folder: expected one of them, to keep results in");
    const std::string path = fmt::format("{}/{}/{}", root, name, rt::sources_hash());
    std::error_code error;
    fs::create_directories(path, error);
    if (error) fail("{}: the folder cannot be made ({})", path, error.message());
    return path;
}

std::string store_path() {
    const std::string path = rt::tuning_path();
    if (path.empty()) fail("ATTUNE_TUNING=off, or no cache folder: expected a store to keep the result in");
    return path;
}

std::string trials_path(const Case &c, int threads) {
    const size_t name = std::hash<std::string>{}(fmt::format("{} {} {}", to_string(c), threads, rt::machine_key()));
    return fmt::format("{}/{:016x}.json", trials_folder(), name);
}

// One writer at a time. The file beside the store stays: removing it would let two in.
class FileLock {
  public:
    explicit FileLock(const std::string &path) : file_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
        if (file_ < 0) fail("{}: cannot be written ({})", path, std::strerror(errno));
        while (flock(file_, LOCK_EX) != 0)
            if (errno != EINTR) fail("{}: cannot be locked ({})", path, std::strerror(errno));
    }
    ~FileLock() { close(file_); }
    FileLock(const FileLock &) = delete;
    FileLock &operator=(const FileLock &) = delete;

  private:
    int file_;
};

// The whole text or nothing, also when the disk is full.
void replace_file(const std::string &path, const std::string &text) {
    const std::string beside = fmt::format("{}.{}.tmp", path, getpid());
    const int file = open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) fail("{}: cannot be written ({})", path, std::strerror(errno));
    size_t done = 0;
    bool ok = true;
    while (ok && done < text.size()) {
        const ssize_t n = write(file, text.data() + done, text.size() - done);
        if (n < 0 && errno == EINTR) continue;
        ok = n > 0;
        if (ok) done += size_t(n);
    }
    ok = ok && fsync(file) == 0;
    const int error = errno;
    close(file);
    if (!ok || std::rename(beside.c_str(), path.c_str()) != 0) {
        const std::string why = std::strerror(ok ? errno : error);
        unlink(beside.c_str());
        fail("{}: cannot be written ({})", path, why);
    }
}

int distance(const rt::Bucket &a, const rt::Bucket &b) {
    return std::abs(a.rows - b.rows) + std::abs(a.keys - b.keys) + std::abs(a.heads - b.heads);
}

} // namespace

std::string kernels_folder() {
    return subfolder("kernels");
}
std::string trials_folder() {
    return subfolder("trials");
}

std::optional<TuningEntry> stored_result(const Case &c, int threads) {
    const std::string path = rt::tuning_path();
    if (path.empty()) return {};
    const rt::Bucket bucket = rt::bucket_of(to_problem(c), threads);
    std::optional<TuningEntry> found;
    const rt::TuningStore store(path);
    for (const TuningEntry &e : store.entries())
        if (e.bucket == bucket && e.sources == rt::sources_hash() && e.case_text == to_string(c)) found = e;
    return found;
}

std::vector<TuningEntry> near_results(const Case &c, int threads, size_t most) {
    const std::string path = rt::tuning_path();
    if (path.empty()) return {};
    const rt::Bucket bucket = rt::bucket_of(to_problem(c), threads);
    const rt::TuningStore store(path);
    std::vector<TuningEntry> near;
    for (const TuningEntry &e : store.entries())
        if (e.bucket.kind == bucket.kind && e.sources == rt::sources_hash() && !e.library.empty()) near.push_back(e);
    std::stable_sort(near.begin(), near.end(), [&](const TuningEntry &a, const TuningEntry &b) {
        return distance(a.bucket, bucket) < distance(b.bucket, bucket);
    });
    if (near.size() > most) near.resize(most);
    return near;
}

void check_store() {
    const std::string path = store_path();
    const std::string folder = fs::path(path).parent_path();
    std::error_code error;
    if (!folder.empty()) fs::create_directories(folder, error);
    if (error) fail("{}: the folder cannot be made ({})", folder, error.message());
    const FileLock lock(path + ".lock");
    if (fs::exists(path) && access(path.c_str(), W_OK) != 0)
        fail("{}: cannot be written ({})", path, std::strerror(errno));
    replace_file(path + ".probe", "x");
    fs::remove(path + ".probe", error);
}

void store_result(const TuningEntry &entry) {
    const std::string path = store_path();
    const FileLock lock(path + ".lock");
    // A file of another machine is replaced: it is of no use here.
    std::string text = rt::tuning_header() + "\n";
    const rt::TuningStore store(path);
    for (const TuningEntry &e : store.entries())
        if (!(e.bucket == entry.bucket && e.sources == entry.sources)) text += rt::to_line(e) + "\n";
    replace_file(path, text + rt::to_line(entry) + "\n");
}

std::vector<std::string> load_tuned(const std::vector<Case> &cases, const std::vector<int> &threads) {
    std::vector<std::string> messages;
    const rt::TuningStore &store = rt::tuning_store();
    if (!store.warning().empty()) messages.push_back(store.warning());
    for (const Case &c : cases)
        for (int t : threads) {
            const TuningEntry *e = store.find(rt::bucket_of(to_problem(c), t));
            if (!e || e->library.empty() || attune_find_kernel(e->kernel.c_str())) continue;
            if (attune_load_kernels(e->library.c_str()) != ATTUNE_OK) messages.push_back(attune_last_error());
        }
    return messages;
}

json read_trials(const Case &c, int threads) {
    try {
        const std::string path = trials_path(c, threads);
        if (!fs::exists(path)) return json::object();
        json j = json::parse(read_file(path));
        return j.is_object() && j.value("case", "") == to_string(c) ? j : json::object();
    } catch (const std::exception &) {
        return json::object();
    }
}

void write_trials(const Case &c, int threads, const json &trials) {
    replace_file(trials_path(c, threads), trials.dump() + "\n");
}

nlohmann::ordered_json stored_catalogue(const std::vector<std::string> &catalogues) {
    const rt::TuningStore store(store_path());
    using nlohmann::ordered_json;
    ordered_json linked = ordered_json::array();
    for (const std::string &path : catalogues)
        for (ordered_json &entry : ordered_json::parse(read_file(path))) linked.push_back(std::move(entry));
    ordered_json out = ordered_json::array();
    const auto has = [&out](const std::string &name) {
        return std::any_of(out.begin(), out.end(), [&](const ordered_json &e) { return e.at("name") == name; });
    };
    for (const TuningEntry &e : store.entries()) {
        if (e.sources != rt::sources_hash() || has(e.kernel)) continue;
        if (e.library.empty()) { // one of the build's own
            for (const ordered_json &entry : linked)
                if (entry.at("name") == e.kernel) out.push_back(entry);
            continue;
        }
        const std::string path = fs::path(e.library).replace_extension(".json");
        if (!fs::exists(path)) continue; // the cache was emptied
        ordered_json entry = ordered_json::parse(read_file(path));
        entry["why"] =
            fmt::format("found by attune tune for {}: {:.2f} x as fast as the default", e.case_text, e.speedup);
        out.push_back(std::move(entry));
    }
    return out;
}

} // namespace attune::tools
