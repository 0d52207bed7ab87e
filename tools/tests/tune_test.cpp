// The parts of attune tune that need no candidate: estimator, shorter problems, drawing of points, and the store with
// everything that may be wrong with its file.
#include "lib/case_list.h"
#include "lib/defaults.h"
#include "lib/tune_store.h"
#include "lib/tuner.h"

#include "lib/error.h"
#include "lib/manifest.h"
#include "lib/numbers.h"
#include "runtime/safetensors.h"

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <gtest/gtest.h>
#include <set>
#include <sys/resource.h>
#include <sys/wait.h>
#include <tuple>
#include <unistd.h>

namespace attune::tools {
namespace {

using rt::Bucket;
using rt::TuningEntry;
using rt::TuningStore;

TEST(Ratio, IgnoresLuckyAndUnluckyRounds) {
    Random random(1);
    std::vector<double> slow, fast;
    for (int i = 0; i < 25; ++i) {
        slow.push_back(1.10 * (1 + 0.01 * random.normal()));
        fast.push_back(1.00 * (1 + 0.01 * random.normal()));
    }
    slow[3] = 5, slow[7] = 0.3, fast[9] = 7, fast[20] = 0.2;
    const Ratio r = ratio_of(slow, fast);
    EXPECT_NEAR(r.mean, 1.10, 0.02);
    EXPECT_GT(std::log(r.mean), 3 * r.error);
}

TEST(Ratio, OfEqualContestantsIsWithinItsError) {
    int beyond = 0;
    for (uint64_t seed = 0; seed < 200; ++seed) {
        Random random(seed);
        std::vector<double> a, b;
        for (int i = 0; i < 25; ++i) a.push_back(1 + 0.02 * random.normal()), b.push_back(1 + 0.02 * random.normal());
        const Ratio r = ratio_of(a, b);
        beyond += std::log(r.mean) > 3 * r.error;
    }
    EXPECT_LE(beyond, 2); // of 200, at three standard errors on one side
}

TEST(Shorter, IsOfTheSameKindAndTakesLessTime) {
    for (const char *text : {"f32:b4:h32/8:n4096:d128:causal", "f32:b2:h8:n1:m65536:d64",
                             "f32:h1:n8192:d40:window=256,0", "f32:b8:h16:n700:d72:mask=bool:softcap=30"}) {
        const Case c = parse_case(text), s = shorter(c, 2);
        EXPECT_LE(useful_flops(s), useful_flops(c)) << text;
        EXPECT_EQ(s.Hq / s.Hkv, c.Hq / c.Hkv) << text;
        EXPECT_EQ(std::tuple(s.dk, s.dv, s.causal, s.window_left, s.mask, s.softcap),
                  std::tuple(c.dk, c.dv, c.causal, c.window_left, c.mask, c.softcap));
        EXPECT_NO_THROW(parse_case(to_string(s))) << text;
    }
    const Case small = parse_case("f32:h2:n64:d64");
    EXPECT_EQ(shorter(small, 2), small);
}

std::vector<TuningSpace> some_spaces() {
    std::vector<TuningSpace> spaces(2);
    for (size_t i = 0; i < 2; ++i) {
        spaces[i].strategy = std::string(1, char('a' + int(i)));
        for (int k = 0; k < 20; ++k) spaces[i].points.push_back({k});
    }
    return spaces;
}

TEST(DrawnPoints, AreTheSameForTheSameSeed) {
    const auto order = [](uint64_t seed) {
        std::vector<int> values;
        for (const DrawnPoint &p : drawn_points(some_spaces(), seed, 100))
            values.push_back(int(p.space) * 100 + p.point[0]);
        return values;
    };
    const auto first = order(1);
    EXPECT_EQ(first, order(1));
    EXPECT_NE(first, order(2));
    EXPECT_EQ(std::set<int>(first.begin(), first.end()).size(), 40u); // each once
    EXPECT_EQ(first[0] / 100, 0);
    EXPECT_EQ(first[1] / 100, 1); // a strategy after the other
}

TEST(Defaults, OrderStrategiesByTheirLoss) {
    const auto ranking = nlohmann::ordered_json::parse(
        R"({"about": "x", "rules": [{"rows_max": 8, "strategies": ["gpu", "a", "b", "c"]}, {"strategies": ["gpu", "a", "b", "c"]}]})");
    const std::vector<Observation> seen = {
        {"long", "a", 100, 3.0},    {"long", "b", 100, 2.0}, {"long", "c", 100, 4.0}, {"longer", "a", 999, 30.0},
        {"longer", "b", 999, 33.0}, {"one", "a", 1, 2.0},    {"one", "c", 1, 1.0},    {"one", "new", 1, 1.5}};
    const auto rules = ranked(ranking, seen).at("rules");
    EXPECT_EQ(rules[0].at("strategies").dump(),
              R"(["gpu","c","b","a","new"])");                             // b was not seen with few rows: it stays
    EXPECT_EQ(rules[1].at("strategies").dump(), R"(["gpu","b","a","c"])"); // of losses 0.05, 0.2, 0.69
}

TEST(CaseList, ReadsLinesAndSuites) {
    const TemporaryFolder folder;
    const std::string path = folder.file("cases");
    write_file(path, "# what occurs\nf32:h8:n128:d64 12\n\nf32:h8:n1024:d64 # once\nf32:h8:n128:d64 3\n");
    const auto list = read_cases(path);
    ASSERT_EQ(list.size(), 2u);
    EXPECT_EQ(to_string(list[0].c), "f32:b1:h8:n128:d64");
    EXPECT_DOUBLE_EQ(list[0].count, 15);
    EXPECT_DOUBLE_EQ(list[1].weight() / list[0].weight(), 64.0 / 15); // 8 x 8 as many pairs
    write_file(path, "{\"cases\": [\"f32:h2:n5:d8\"]}");
    EXPECT_EQ(read_cases(path).size(), 1u);
    for (const auto &[text, message] : {std::pair{"f32:h8:n128:d64 many", "line 1: 'many' behind the case"},
                                        {"f32:h2:n5:d8\nf32:h2:n5:d8 -1", "line 2: '-1' behind"},
                                        {"\n\nf33:h2", "line 3: "},
                                        {"# nothing", "has no case"},
                                        {"{\"cases\": 3", "expected {\"cases\""}}) {
        write_file(path, text);
        try {
            read_cases(path);
            ADD_FAILURE() << text;
        } catch (const Error &e) {
            EXPECT_NE(std::string(e.what()).find(message), std::string::npos) << e.what();
        }
    }
}

TEST(CaseList, FindsTheShapesOfAModel) {
    const TemporaryFolder folder;
    const std::string path = folder.file("model.safetensors");
    const std::vector<float> numbers(2 * 4 * 6 * 8, 0.0f);
    const auto tensor = [&](std::vector<int64_t> shape) {
        size_t bytes = sizeof(float);
        for (int64_t n : shape) bytes *= size_t(n);
        return rt::SafetensorsFile::Tensor{"F32", std::move(shape), reinterpret_cast<const std::byte *>(numbers.data()),
                                           bytes};
    };
    std::map<std::string, rt::SafetensorsFile::Tensor> tensors;
    for (int layer = 0; layer < 3; ++layer)
        for (const char *which : {"q", "k", "v"})
            tensors[fmt::format("layer{}.{}", layer, which)] =
                tensor({2, which[0] == 'q' ? 4 : 2, 6, layer == 2 ? 4 : 8});
    std::string error;
    ASSERT_TRUE(rt::write_safetensors(path, tensors, error)) << error;
    const auto list = model_cases(path);
    ASSERT_EQ(list.size(), 2u);
    EXPECT_EQ(to_string(list[0].c), "f32:b2:h4/2:n6:d8");
    EXPECT_DOUBLE_EQ(list[0].count, 2);
    EXPECT_EQ(to_string(list[1].c), "f32:b2:h4/2:n6:d4");
    tensors.erase("layer1.v");
    ASSERT_TRUE(rt::write_safetensors(path, tensors, error)) << error;
    EXPECT_THROW(model_cases(path), Error);
}

class Store : public testing::Test {
  protected:
    void SetUp() override { setenv("ATTUNE_TUNING", path_.c_str(), 1); }
    void TearDown() override { unsetenv("ATTUNE_TUNING"); }
    static Bucket bucket(const char *text, int threads = 2) {
        return rt::bucket_of(to_problem(parse_case(text)), threads);
    }
    static TuningEntry entry(const char *text, const std::string &kernel) {
        return {bucket(text), rt::sources_hash(), kernel, "", text, 1.25};
    }
    static std::string found(const TuningStore &store, const char *text, int threads = 2) {
        const TuningEntry *e = store.find(bucket(text, threads));
        return e ? e->kernel : "";
    }

    const TemporaryFolder folder_;
    const std::string path_ = folder_.file("store.tsv");
};

TEST_F(Store, KeepsOneResultABucket) {
    store_result(entry("f32:h8:n1024:d64", "first"));
    store_result(entry("f32:h8:n1000:d64", "second")); // the same half octave
    store_result(entry("f32:h8:n1024:d64:causal", "third"));
    const TuningStore store(path_);
    EXPECT_EQ(store.warning(), "");
    EXPECT_EQ(store.entries().size(), 2u);
    EXPECT_EQ(found(store, "f32:h8:n1024:d64"), "second");
    EXPECT_EQ(found(store, "f32:h8:n1024:d64:causal"), "third");
    EXPECT_DOUBLE_EQ(store.entries()[0].speedup, 1.25);
}

TEST_F(Store, SizesBetweenUseTheNearestBucketWithinAFactorOfTwo) {
    store_result(entry("f32:h8:n1024:d64", "k1024"));
    store_result(entry("f32:h8:n4096:d64", "k4096"));
    const TuningStore store(path_);
    EXPECT_EQ(found(store, "f32:h8:n1200:d64"), "k1024");
    EXPECT_EQ(found(store, "f32:h8:n1450:d64"), "k1024"); // a step in rows and one in keys
    EXPECT_EQ(found(store, "f32:h8:n2048:d64"), "");      // two steps in each: too far from both
    EXPECT_EQ(found(store, "f32:h8:n1024:m2048:d64"), "k1024");
    EXPECT_EQ(found(store, "f32:h8:n3000:d64"), "k4096");
    EXPECT_EQ(found(store, "f32:h16:n1024:d64"), "k1024");
    EXPECT_EQ(found(store, "f32:h64:n1024:d64"), "");
    // What changes which kernel is fastest is never crossed.
    for (const char *other :
         {"f32:h8:n1024:d72", "f32:h8/2:n1024:d64", "f32:h8:n1024:d64:causal", "f32:h8:n1024:d64:mask=bool",
          "f32:h8:n1024:d64:window=64,0", "bf16:h8:n1024:d64", "f32:h8:n1024:d64/32"})
        EXPECT_EQ(found(store, other), "") << other;
    EXPECT_EQ(found(store, "f32:h8:n1024:d64", 1), "");
}

TEST_F(Store, ADamagedLineIsAMissWithAWarning) {
    for (int i = 0; i < 8; ++i)
        store_result(entry(fmt::format("f32:h8:n{}:d64", 64 << i).c_str(), fmt::format("k{}", i)));
    const std::string whole = read_file(path_);
    Random random(3);
    for (int round = 0; round < 300; ++round) {
        std::string text = whole;
        const size_t header = text.find('\n') + 1;
        const size_t at = header + size_t(random.between(0, int64_t(text.size() - header) - 1));
        switch (random.between(0, 2)) {
        case 0:
            text[at] = char(random.between(1, 255));
            break;
        case 1:
            text.resize(at); // as a crash of the file system might leave it
            break;
        default:
            text.erase(at, 5);
        }
        write_file(path_, text);
        const TuningStore store(path_);
        for (const TuningEntry &e : store.entries()) // what is left is as it was written
            EXPECT_NE(whole.find(rt::to_line(e)), std::string::npos);
        if (text.back() != '\n') { // cut within a line; at the end of one, nothing can be seen
            EXPECT_NE(store.warning(), "") << text;
        }
    }
}

TEST_F(Store, OfAnotherMachineOrStateIsIgnored) {
    store_result(entry("f32:h8:n1024:d64", "mine"));
    std::string text = read_file(path_);
    text.replace(text.find('\t') + 1, 3, "VIA");
    write_file(path_, text);
    const TuningStore foreign(path_);
    EXPECT_EQ(found(foreign, "f32:h8:n1024:d64"), "");
    EXPECT_NE(foreign.warning().find("VIA"), std::string::npos) << foreign.warning();
    TuningEntry old = entry("f32:h8:n1024:d64", "old");
    old.sources = "0123456789abcdef";
    std::filesystem::remove(path_);
    store_result(old);
    EXPECT_EQ(found(TuningStore(path_), "f32:h8:n1024:d64"), "");
    EXPECT_EQ(TuningStore(folder_.file("none")).warning(), "");
    EXPECT_NE(TuningStore(folder_.file(".")).warning(), ""); // a folder
}

TEST_F(Store, OfTwoWritersLosesNothing) {
    const auto write = [&](int which) {
        for (int i = 0; i < 20; ++i)
            store_result(entry(fmt::format("f32:h{}:n{}:d{}", 1, 64, 8 * (1 + 20 * which + i)).c_str(), "k"));
    };
    const pid_t child = fork();
    if (child == 0) {
        write(1);
        _exit(0);
    }
    write(0);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(TuningStore(path_).entries().size(), 40u);
    EXPECT_EQ(TuningStore(path_).warning(), "");
}

TEST_F(Store, ThatCannotBeWrittenIsAnErrorThatNamesIt) {
    setenv("ATTUNE_TUNING", "/proc/attune/none.tsv", 1);
    try {
        check_store();
        ADD_FAILURE();
    } catch (const Error &e) {
        EXPECT_NE(std::string(e.what()).find("/proc/attune"), std::string::npos) << e.what();
    }
}

TEST_F(Store, OnAFullDiskStaysAsItWas) {
    store_result(entry("f32:h8:n1024:d64", "old"));
    const std::string before = read_file(path_);
    const pid_t child = fork(); // no file may grow beyond a few bytes in it
    if (child == 0) {
        const rlimit limit{16, 16};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        try {
            store_result(entry("f32:h8:n64:d64", "new"));
        } catch (const Error &e) {
            _exit(std::string(e.what()).find(path_) != std::string::npos ? 0 : 2);
        }
        _exit(1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(read_file(path_), before);
    EXPECT_EQ(found(TuningStore(path_), "f32:h8:n1024:d64"), "old");
}

TEST_F(Store, LooksUpFastAmongTenThousand) {
    std::string text = rt::tuning_header() + "\n";
    Random random(5);
    for (int i = 0; i < 10000; ++i) {
        TuningEntry e = entry("f32:h8:n1024:d64", "k");
        e.bucket.rows = int(random.between(16, 44)), e.bucket.keys = int(random.between(16, 44)),
        e.bucket.heads = int(random.between(1, 20));
        text += rt::to_line(e) + "\n";
    }
    write_file(path_, text);
    const TuningStore store(path_);
    ASSERT_EQ(store.entries().size(), 10000u);
    const attune_problem problem = to_problem(parse_case("f32:h2:n300:m70000:d64"));
    double best = 1;
    for (int round = 0; round < 50; ++round) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < 100; ++i) {
            const TuningEntry *e = store.find(rt::bucket_of(problem, 2));
            asm volatile("" : : "g"(e) : "memory");
        }
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 100);
    }
    EXPECT_LE(best, 5e-6);
}

} // namespace
} // namespace attune::tools
