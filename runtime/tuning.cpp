#include "tuning.h"

#include "cpu_features.h"
#include "format.h"

#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attune::rt {

namespace {

constexpr int kFormat = 1;
constexpr int kFurthest = 2; // steps of half an octave in all: a factor of two in one size
// What changes which kernel is fastest. kv_len, offsets and strides do not.
constexpr uint32_t kFlags = ATTUNE_CAUSAL | ATTUNE_MASK | ATTUNE_BIAS | ATTUNE_SOFTCAP | ATTUNE_ALIBI | ATTUNE_SINK |
                            ATTUNE_SCORES | ATTUNE_VARLEN;

std::string cpu_model() {
#if defined(__x86_64__)
    std::array<unsigned, 12> words{};
    for (unsigned i = 0; i < 3; i++)
        if (!__get_cpuid(0x80000002 + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]))
            return "x86-64";
    std::string name(reinterpret_cast<const char *>(words.data()), sizeof words);
    name.erase(std::strlen(name.c_str()));
    name.erase(0, name.find_first_not_of(' '));
    name.erase(name.find_last_not_of(' ') + 1);
    return name;
#else
    return "unknown CPU";
#endif
}

// Each number to 16, then steps of half an octave.
int step(int64_t size) {
    return size <= 16 ? int(size) : 16 + int(std::lround(2 * std::log2(double(size) / 16)));
}

int octave_step(int64_t size) {
    return size < 1 ? 0 : 1 + int(std::lround(2 * std::log2(double(size))));
}

uint64_t pack(int rows, int keys, int heads) {
    return (uint64_t(uint16_t(rows)) << 32) | (uint64_t(uint16_t(keys)) << 16) | uint16_t(heads);
}

// FNV-1a.
uint32_t checksum(std::string_view text) {
    uint32_t h = 2166136261u;
    for (unsigned char c : text) h = (h ^ c) * 16777619u;
    return h;
}

template <typename T> bool number(std::string_view text, T &value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size();
}

} // namespace

const std::string &machine_key() {
    static const std::string key =
        formatted("{}, {}, {} cores, caches {} {} {}", cpu_model(), detected_isa(), sysconf(_SC_NPROCESSORS_ONLN),
                  sysconf(_SC_LEVEL1_DCACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE), sysconf(_SC_LEVEL3_CACHE_SIZE));
    return key;
}

const char *sources_hash() {
    return
#include "sources_hash.inc"
        ;
}

std::string cache_folder() {
    if (const char *xdg = std::getenv("XDG_CACHE_HOME"); xdg && *xdg == '/') return std::string(xdg) + "/attune";
    if (const char *home = std::getenv("HOME"); home && *home == '/') return std::string(home) + "/.cache/attune";
    return "";
}

std::string tuning_path() {
    if (const char *text = std::getenv("ATTUNE_TUNING"); text && *text)
        return std::string_view(text) == "off" ? "" : text;
    const std::string folder = cache_folder();
    return folder.empty() ? "" : formatted("{}/tuning/{:08x}.tsv", folder, checksum(machine_key()));
}

Bucket bucket_of(const attune_problem &p, int threads) {
    // A window counts by its width.
    const auto window = [](int64_t keys) { return keys < 0 ? -1 : step(keys); };
    return {formatted("{}/{}/{} device{} d{}/{} group{} threads{} flags{:x} window{},{}", int(p.q_dtype),
                      int(p.kv_dtype), int(p.o_dtype), int(p.device), p.dk, p.dv, p.Hkv ? p.Hq / p.Hkv : 0, threads,
                      p.flags & kFlags, window(p.window_left), window(p.window_right)),
            step(p.N), step(p.M), octave_step(p.B * p.Hkv)};
}

std::string tuning_header() {
    return formatted("attune tuning {}\t{}", kFormat, machine_key());
}

std::string to_line(const TuningEntry &e) {
    std::string text = formatted("{}\t{}\t{}\t{}", e.bucket.kind, e.bucket.rows, e.bucket.keys, e.bucket.heads);
    for (const std::string &part : {e.sources, e.kernel, e.library, e.case_text}) text += '\t' + part;
    text += formatted("\t{:.4f}", e.speedup);
    for (char &c : text)
        if (c == '\n') c = ' ';
    return formatted("{:08x}\t{}", checksum(text), text);
}

bool parse_line(std::string_view line, TuningEntry &e) {
    std::array<std::string_view, 10> parts;
    std::string_view rest = line;
    for (size_t i = 0; i < parts.size(); i++) {
        const size_t tab = rest.find('\t');
        if ((tab == std::string_view::npos) != (i + 1 == parts.size())) return false;
        parts[i] = rest.substr(0, tab);
        if (tab != std::string_view::npos) rest.remove_prefix(tab + 1);
    }
    if (parts[0] != formatted("{:08x}", checksum(line.substr(parts[0].size() + 1)))) return false;
    e.bucket.kind = parts[1];
    e.sources = parts[5], e.kernel = parts[6], e.library = parts[7], e.case_text = parts[8];
    return number(parts[2], e.bucket.rows) && number(parts[3], e.bucket.keys) && number(parts[4], e.bucket.heads) &&
           number(parts[9], e.speedup);
}

TuningStore::TuningStore(const std::string &path) {
    const std::unique_ptr<FILE, int (*)(FILE *)> file(std::fopen(path.c_str(), "re"), std::fclose);
    if (!file) {
        if (errno != ENOENT && errno != ENOTDIR) warning_ = formatted("{}: {}", path, std::strerror(errno));
        return;
    }
    std::string text;
    std::array<char, 1 << 14> part;
    while (const size_t n = std::fread(part.data(), 1, part.size(), file.get())) text.append(part.data(), n);
    if (std::ferror(file.get())) {
        warning_ = formatted("{}: {}", path, std::strerror(errno));
        return;
    }
    std::string_view rest = text;
    const auto next = [&rest] {
        const size_t end = rest.find('\n');
        const std::string_view line = rest.substr(0, end);
        rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
        return line;
    };
    if (const std::string_view header = next(); header != tuning_header()) {
        warning_ =
            formatted("{}: begins with '{}': expected '{}'; ignored", path, header.substr(0, 120), tuning_header());
        return;
    }
    int damaged = 0;
    while (!rest.empty()) {
        TuningEntry e;
        if (!parse_line(next(), e)) {
            damaged++;
            continue;
        }
        if (e.sources == sources_hash())
            places_[e.bucket.kind][pack(e.bucket.rows, e.bucket.keys, e.bucket.heads)] = entries_.size();
        entries_.push_back(std::move(e));
    }
    if (damaged) warning_ = formatted("{}: {} damaged lines are ignored", path, damaged);
}

const TuningEntry *TuningStore::find(const Bucket &b) const {
    const auto kind = places_.find(b.kind);
    if (kind == places_.end()) return nullptr;
    const auto at = [&](int rows, int keys, int heads) -> const TuningEntry * {
        const auto it = kind->second.find(pack(b.rows + rows, b.keys + keys, b.heads + heads));
        return it == kind->second.end() ? nullptr : &entries_[it->second];
    };
    // Ring by ring; within one, a difference in heads matters least and one in rows most.
    for (int distance = 0; distance <= kFurthest; distance++)
        for (int rows = 0; rows <= distance; rows++)
            for (int keys = 0; keys + rows <= distance; keys++) {
                const int heads = distance - rows - keys;
                for (int signs = 0; signs < 8; signs++) {
                    const auto with = [&](int x, int bit) { return signs & bit ? -x : x; };
                    if ((!rows && signs & 1) || (!keys && signs & 2) || (!heads && signs & 4)) continue;
                    if (const TuningEntry *e = at(with(rows, 1), with(keys, 2), with(heads, 4))) return e;
                }
            }
    return nullptr;
}

const TuningStore &tuning_store() {
    static const TuningStore store = [] {
        const std::string path = tuning_path();
        return path.empty() ? TuningStore() : TuningStore(path);
    }();
    return store;
}

} // namespace attune::rt
