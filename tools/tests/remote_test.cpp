// Child processes that answer or do not, and the inputs that contestants share.
#include "lib/case.h"
#include "lib/inputs.h"
#include "lib/remote.h"

#include <csignal>
#include <cstring>
#include <fstream>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

namespace attune::tools {
namespace {

using nlohmann::json;

// A child that runs a line of shell for each line that it reads.
std::vector<std::string> shell(const std::string &each) {
    return {"/bin/sh", "-c", "while read -r line; do " + each + "; done"};
}

std::string failure(ChildProcess &child, double seconds = 5) {
    try {
        child.ask({{"op", "run"}}, seconds);
    } catch (const ChildError &e) {
        return e.what();
    }
    return "";
}

bool is_gone(pid_t pid) {
    for (int i = 0; i < 200; ++i) {
        if (kill(pid, 0) != 0) return true;
        usleep(10000);
    }
    return false;
}

TEST(ChildProcess, AnswersWithItsEnvironment) {
    ChildProcess child(shell(R"(echo "{\"x\": \"$ATTUNE_TEST_VALUE\"}")"), {{"ATTUNE_TEST_VALUE", "a b"}});
    for (int i = 0; i < 3; ++i) EXPECT_EQ(child.ask({{"op", "run"}}, 5), json({{"x", "a b"}}));
    EXPECT_TRUE(child.alive());
}

TEST(ChildProcess, StandsStillWhileItIsStopped) {
    ChildProcess child(shell("echo '{}'"), {});
    child.ask({{"op", "run"}}, 5);
    child.stop();
    std::string state;
    std::ifstream file("/proc/" + std::to_string(child.pid()) + "/stat");
    file >> state >> state >> state;
    EXPECT_EQ(state, "T");
    child.resume();
    EXPECT_EQ(child.ask({{"op", "run"}}, 5), json::object());
}

TEST(ChildProcess, EndsAreToldApart) {
    ChildProcess crashes(shell("kill -SEGV $$"), {}), ends(shell("echo 'no licence' >&2; exit 7"), {}),
        babbles(shell("echo hello"), {}), hangs(shell("sleep 100"), {});
    EXPECT_NE(failure(crashes).find("signal 11"), std::string::npos);
    EXPECT_EQ(failure(ends), "ended with status 7; its last line: no licence");
    EXPECT_EQ(failure(babbles), "answered 'hello' (killed); expected a JSON object");
    const pid_t pid = hangs.pid();
    EXPECT_EQ(failure(hangs, 0.2), "did not answer 'run' within 0.2 s (killed)");
    EXPECT_TRUE(is_gone(-pid)) << "its child, sleep, is still there";
    for (ChildProcess *child : {&crashes, &ends, &babbles, &hangs}) {
        EXPECT_FALSE(child->alive());
        EXPECT_EQ(failure(*child), "the process has ended");
    }
}

TEST(ChildProcess, AProgramThatIsNotThereSaysSo) {
    ChildProcess child({"/nowhere/program"}, {});
    EXPECT_EQ(failure(child), "ended with status 127; its last line: /nowhere/program: No such file or directory");
}

TEST(ChildProcess, IsGoneWithItsChildrenWhenTheObjectIs) {
    pid_t pid;
    {
        ChildProcess child(shell("sleep 100 & echo '{}'"), {});
        child.ask({{"op", "run"}}, 5);
        child.stop();
        pid = child.pid();
    }
    EXPECT_TRUE(is_gone(-pid));
}

TEST(SharedCase, HoldsTheArraysDenseWhateverTheLayout) {
    std::vector<std::vector<char>> contents;
    for (const char *text :
         {"f32:b2:h4/2:n3:m5:d8/6", "f32:b2:h4/2:n3:m5:d8/6:layout=bshd", "f32:b2:h4/2:n3:m5:d8/6:layout=col"}) {
        const Inputs inputs(parse_case(text), {});
        const SharedCase shared(inputs, 0, 1);
        const json message = shared.prepare_message(2);
        std::vector<char> all;
        for (const char *name : {"q", "k", "v"}) {
            std::ifstream file(message["arrays"][name].get<std::string>(), std::ios::binary);
            all.insert(all.end(), std::istreambuf_iterator<char>(file), {});
        }
        EXPECT_EQ(all.size(), size_t(4 * (2 * 4 * 3 * 8 + 2 * 2 * 5 * 8 + 2 * 2 * 5 * 6)));
        EXPECT_EQ(message["threads"], 2);
        EXPECT_EQ(message["problem"]["Hkv"], 2);
        contents.push_back(std::move(all));
    }
    EXPECT_EQ(contents[0], contents[1]);
    EXPECT_EQ(contents[0], contents[2]);
}

TEST(SharedCase, MasksAndOffsetsAreDescribed) {
    const Inputs inputs(
        parse_case("f32:b2:h2:n3:m5:d4:causal-br:window=2,0:mask=bool:mask=bias:alibi:kvlen=4,5:scale=0.5"), {});
    const SharedCase shared(inputs, 0, 1);
    const json message = shared.prepare_message(1);
    const json &p = message["problem"];
    EXPECT_EQ(p["offset"], json({2, 2}));
    EXPECT_EQ(p["window"], json({2, 0}));
    EXPECT_EQ(p["kv_len"], json({4, 5}));
    EXPECT_EQ(p["scale"], 0.5);
    EXPECT_EQ(p["default_scale"], false);
    EXPECT_EQ(p["causal"], true);
    const auto size = [&](const char *name) {
        struct stat status {};
        stat(message["arrays"][name].get<std::string>().c_str(), &status);
        return int64_t(status.st_size);
    };
    EXPECT_EQ(size("mask"), 2 * 5);
    EXPECT_EQ(size("bias"), 2 * 3 * 5 * 4);
    EXPECT_EQ(size("slopes"), 2 * 4);
}

TEST(Copies, FillTheCachesFourTimesWhereReadingIsTheWork) {
    Machine machine;
    machine.l3 = 32 << 20;
    const auto copies = [&](const char *text) { return copies_needed(parse_case(text), machine); };
    EXPECT_EQ(copies("f32:b1:h32:n1:m4096:d128"), 1);   // 128 MiB
    EXPECT_EQ(copies("f32:b1:h32/8:n1:m4096:d128"), 4); // 32 MiB
    EXPECT_EQ(copies("f32:b1:h8/1:n1:m32768:d128"), 4);
    EXPECT_EQ(copies("f32:b1:h32/8:n16:m8192:d128:causal-br"), 1); // computes
    EXPECT_EQ(copies("f32:b16:h8:n16:d2"), 1);                     // small, but no decode
    EXPECT_EQ(copies("f32:b1:h1:n1:m1:d8"), 1);
}

} // namespace
} // namespace attune::tools
