// Detection and calibration.
#include "machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <sched.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace attune::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string trim(std::string s) {
    const char *blanks = " \t\n\r";
    s.erase(0, std::min(s.find_first_not_of(blanks), s.size()));
    s.erase(s.find_last_not_of(blanks) + 1);
    return s;
}

std::string cpu_model() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        const size_t colon = line.find(':');
        if (colon != std::string::npos && trim(line.substr(0, colon)) == "model name")
            return trim(line.substr(colon + 1));
    }
    return "unknown CPU";
}

int64_t cache_bytes(int level) {
    for (int index = 0; index < 8; ++index) {
        const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
        std::ifstream level_file(folder + "level"), type_file(folder + "type"), size_file(folder + "size");
        int found = 0;
        std::string type, size;
        if (!(level_file >> found) || !(type_file >> type) || !(size_file >> size)) continue;
        if (found != level || type == "Instruction") continue;
        char *unit = nullptr;
        const int64_t number = std::strtoll(size.c_str(), &unit, 10);
        return number * (*unit == 'K' ? 1024 : *unit == 'M' ? 1024 * 1024 : 1);
    }
    return 0;
}

// One chunk of multiply-adds; returns the number of floating-point operations it did.
using Chunk = double (*)();

#if defined(__x86_64__)
constexpr int kRounds = 20000; // of 12 instructions: about 60 microseconds a chunk at 4 GHz

double chunk_sse41() {
    // Multiplications and additions go to different units, so six chains of each; the factor 1 keeps values normal.
    __m128 a0 = _mm_set1_ps(1.0f), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0;
    __m128 b0 = a0, b1 = a0, b2 = a0, b3 = a0, b4 = a0, b5 = a0;
    const __m128 one = a0, zero = _mm_setzero_ps();
    for (int i = 0; i < kRounds; ++i) {
#define MULTIPLY_ADD(m, a) __asm__ volatile("mulps %2, %0\n\taddps %3, %1" : "+x"(m), "+x"(a) : "x"(one), "x"(zero))
        MULTIPLY_ADD(a0, b0);
        MULTIPLY_ADD(a1, b1);
        MULTIPLY_ADD(a2, b2);
        MULTIPLY_ADD(a3, b3);
        MULTIPLY_ADD(a4, b4);
        MULTIPLY_ADD(a5, b5);
#undef MULTIPLY_ADD
    }
    return double(kRounds) * 12 * 4;
}

// Twelve chains cover the latency of 4 cycles on two units, and leave registers for the operands.
#define TWELVE(F) F(a0) F(a1) F(a2) F(a3) F(a4) F(a5) F(a6) F(a7) F(a8) F(a9) F(a10) F(a11)

__attribute__((target("avx2,fma"))) double chunk_avx2() {
    __m256 a0 = _mm256_set1_ps(1.0f), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0, a8 = a0, a9 = a0,
           a10 = a0, a11 = a0;
    const __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f);
    for (int i = 0; i < kRounds; ++i) {
#define FMA(r) __asm__ volatile("vfmadd213ps %2, %1, %0" : "+x"(r) : "x"(x), "x"(y));
        TWELVE(FMA)
#undef FMA
    }
    return double(kRounds) * 12 * 16;
}

__attribute__((target("avx512f"))) double chunk_avx512() {
    __m512 a0 = _mm512_set1_ps(1.0f), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0, a8 = a0, a9 = a0,
           a10 = a0, a11 = a0;
    const __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
    for (int i = 0; i < kRounds; ++i) {
#define FMA(r) __asm__ volatile("vfmadd213ps %2, %1, %0" : "+v"(r) : "v"(x), "v"(y));
        TWELVE(FMA)
#undef FMA
    }
    return double(kRounds) * 12 * 32;
}

__attribute__((target("avx512f,avx512bf16"))) double chunk_avx512_bf16() {
    __m512 a0 = _mm512_set1_ps(1.0f), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0, a8 = a0, a9 = a0,
           a10 = a0, a11 = a0;
    const __m512 x = _mm512_set1_ps(1e-3f), y = x;
    for (int i = 0; i < kRounds; ++i) {
#define DOT(r) __asm__ volatile("vdpbf16ps %2, %1, %0" : "+v"(r) : "v"(x), "v"(y));
        TWELVE(DOT)
#undef DOT
    }
    return double(kRounds) * 12 * 64;
}
#undef TWELVE
#endif

Chunk chunk_of(const std::string &isa) {
#if defined(__x86_64__)
    if (isa == "sse41") return chunk_sse41;
    if (isa == "avx2") return chunk_avx2;
    if (isa == "avx512") return chunk_avx512;
    if (isa == "avx512_bf16") return chunk_avx512_bf16;
#endif
    (void)isa;
    return nullptr;
}

// Reads one block; nothing is computed with it.
constexpr size_t kReadBlock = 1 << 20;
using ReadBlock = void (*)(const char *, size_t); // whole 512 bytes

void read_words(const char *block, size_t bytes) {
    const auto *words = reinterpret_cast<const uint64_t *>(block);
    uint64_t sums[8] = {};
    for (size_t i = 0; i < bytes / 8; i += 8)
        for (size_t k = 0; k < 8; ++k) sums[k] += words[i + k];
    uint64_t sum = 0;
    for (uint64_t s : sums) sum += s;
    __asm__ volatile("" : : "r"(sum)); // the reads must not be optimised away
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void read_avx2(const char *block, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 256) {
        __m256 a, b, c, d;
        for (size_t k = 0; k < 256; k += 128)
            __asm__ volatile("vmovups %4, %0\n\tvmovups %5, %1\n\tvmovups %6, %2\n\tvmovups %7, %3"
                             : "=x"(a), "=x"(b), "=x"(c), "=x"(d)
                             : "m"(block[i + k]), "m"(block[i + k + 32]), "m"(block[i + k + 64]),
                               "m"(block[i + k + 96]));
    }
}

__attribute__((target("avx512f"))) void read_avx512(const char *block, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 512) {
        __m512 a, b, c, d;
        for (size_t k = 0; k < 512; k += 256)
            __asm__ volatile("vmovups %4, %0\n\tvmovups %5, %1\n\tvmovups %6, %2\n\tvmovups %7, %3"
                             : "=v"(a), "=v"(b), "=v"(c), "=v"(d)
                             : "m"(block[i + k]), "m"(block[i + k + 64]), "m"(block[i + k + 128]),
                               "m"(block[i + k + 192]));
    }
}
#endif

ReadBlock best_read(const Machine &machine) {
#if defined(__x86_64__)
    const auto has = [&machine](const char *isa) {
        return std::find(machine.isas.begin(), machine.isas.end(), isa) != machine.isas.end();
    };
    if (has("avx512")) return read_avx512;
    if (has("avx2")) return read_avx2;
#endif
    (void)machine;
    return read_words;
}

// Runs body(thread) on `threads` threads, all released at once.
void together(int threads, const std::function<void(int)> &body) {
    std::atomic<int> waiting{threads};
    const auto run = [&](int thread) {
        waiting.fetch_sub(1);
        while (waiting.load() > 0) std::this_thread::yield();
        body(thread);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(run, t);
    run(0);
    for (auto &t : others) t.join();
}

} // namespace

Machine detect_machine() {
    Machine m;
    m.cpu = cpu_model();
    cpu_set_t set;
    CPU_ZERO(&set);
    m.cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : int(std::thread::hardware_concurrency());
    m.cores = std::max(m.cores, 1);
#if defined(__x86_64__)
    // GCC's test includes the operating system's part (XGETBV).
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512cd");
    if (__builtin_cpu_supports("sse4.1")) m.isas.push_back("sse41");
    if (avx2) m.isas.push_back("avx2");
    if (avx512) m.isas.push_back("avx512");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) m.isas.push_back("avx512_bf16");
#endif
    m.l1d = cache_bytes(1);
    m.l2 = cache_bytes(2);
    m.l3 = cache_bytes(3);
    m.memory = int64_t(sysconf(_SC_PHYS_PAGES)) * int64_t(sysconf(_SC_PAGESIZE));
    return m;
}

double measure_peak_gflops(const std::string &isa, int threads, double seconds) {
    const Machine machine = detect_machine();
    const Chunk chunk = chunk_of(isa);
    if (!chunk || std::find(machine.isas.begin(), machine.isas.end(), isa) == machine.isas.end()) return 0;
    // The best chunk of each thread: a peak is what the units can do, not what a neighbour left of the time.
    std::vector<double> best(size_t(threads), 0.0);
    together(threads, [&](int thread) {
        const auto start = Clock::now();
        do {
            const auto begin = Clock::now();
            const double operations = chunk();
            best[size_t(thread)] = std::max(best[size_t(thread)], operations / seconds_since(begin) * 1e-9);
        } while (seconds_since(start) < seconds);
    });
    double total = 0;
    for (double b : best) total += b;
    return total;
}

double measure_peak_gflops(const Machine &machine, attune_dtype dtype, int threads, double seconds) {
    double most = 0;
    for (const std::string &isa : machine.isas) {
        const bool bf16_only = isa == "avx512_bf16";
        if (bf16_only && dtype != ATTUNE_BF16) continue;
        // A wider ISA is never slower on these loops, so only the last two are worth the time.
        if (isa == "sse41" && machine.isas.size() > 1) continue;
        most = std::max(most, measure_peak_gflops(isa, threads, seconds));
    }
    return most;
}

double measure_read_gbps(const Machine &machine, int threads, double seconds) {
    const int64_t l3 = machine.l3 > 0 ? machine.l3 : (int64_t(32) << 20);
    const size_t total = size_t(std::min<int64_t>(std::max<int64_t>(4 * l3, int64_t(64) << 20), machine.memory / 8));
    const size_t each = std::max<size_t>(total / size_t(threads) / kReadBlock, 1) * kReadBlock;
    const ReadBlock read = best_read(machine);
    std::vector<double> rate(size_t(threads), 0.0);
    together(threads, [&](int thread) {
        void *memory = mmap(nullptr, each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return;
        madvise(memory, each, MADV_HUGEPAGE); // the most that can be read, so without the cost of 4 KB pages
        std::memset(memory, 1, each);
        size_t bytes = 0, position = 0;
        const auto start = Clock::now();
        double elapsed = 0;
        do {
            read(static_cast<const char *>(memory) + position, kReadBlock);
            bytes += kReadBlock;
            position = (position + kReadBlock) % each;
            elapsed = seconds_since(start);
        } while (elapsed < seconds);
        rate[size_t(thread)] = double(bytes) / elapsed * 1e-9;
        munmap(memory, each);
    });
    double gbps = 0;
    for (double r : rate) gbps += r;
    return gbps;
}

double measure_read_gbps(const Machine &machine, int threads, const std::vector<std::span<const std::byte>> &arrays,
                         double seconds) {
    const ReadBlock read = best_read(machine);
    constexpr size_t kPiece = 4096; // of a stream before the next one has its turn
    // Several streams at once occupy more prefetchers: a kernel that reads K and V side by side passed a loop of one
    // stream by 7 %. The best of them is what can be read.
    double best = 0;
    for (size_t streams : {1, 2, 4}) {
        std::vector<double> rate(size_t(threads), 0.0);
        together(threads, [&](int thread) {
            size_t bytes = 0;
            const auto start = Clock::now();
            double elapsed = 0;
            do {
                for (const auto &array : arrays) {
                    const size_t pieces = array.size() / kPiece, first = pieces * size_t(thread) / size_t(threads);
                    const size_t count = pieces * size_t(thread + 1) / size_t(threads) - first, each = count / streams;
                    const char *data = reinterpret_cast<const char *>(array.data()) + first * kPiece;
                    for (size_t i = 0; i < each; ++i)
                        for (size_t s = 0; s < streams; ++s) read(data + (s * each + i) * kPiece, kPiece);
                    bytes += each * streams * kPiece;
                }
                elapsed = seconds_since(start);
            } while (elapsed < seconds / 3 && bytes > 0);
            rate[size_t(thread)] = double(bytes) / elapsed * 1e-9;
        });
        double gbps = 0;
        for (double r : rate) gbps += r;
        best = std::max(best, gbps);
    }
    return best;
}

} // namespace attune::tools
