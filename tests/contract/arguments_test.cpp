// Contract 3.14: every wrong argument of the C interface gets a status and a message that names the argument, its value
// and what was expected; nothing aborts, and nothing is written.
#include "attune/kernel.h"
#include "bed.h"

#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <limits>

namespace attune::contract {
namespace {

using namespace tools;

using Contract_3_14 = ContractTest;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

// All that a call takes. A mutation changes one thing of a right call.
struct Call {
    attune_problem p;
    attune_plan_options options;
    attune_tensors t;
    attune_tensor mask, bias, lse, scores;
    std::vector<int64_t> kv_len, offsets;
    size_t workspace_less = 0;
    bool null_problem = false, null_plan_out = false, null_plan = false, null_tensors = false, null_workspace = false;
};

struct Mutation {
    const char *name;
    std::function<void(Call &)> change;
    std::vector<std::string> words; // all of them are in the message
    attune_status status = ATTUNE_INVALID_ARGUMENT;
};

// Changes that attune_plan_create has to find.
const std::vector<Mutation> kWrongProblems = {
    {"null problem", [](Call &c) { c.null_problem = true; }, {"problem is null", "expected"}},
    {"null plan", [](Call &c) { c.null_plan_out = true; }, {"plan is null", "expected"}},
    {"struct_size", [](Call &c) { c.p.struct_size = 8; }, {"problem.struct_size is 8", "attune_problem_init"}},
    {"q_dtype", [](Call &c) { c.p.q_dtype = ATTUNE_U8; }, {"q_dtype is 3", "ATTUNE_F32"}},
    {"kv_dtype", [](Call &c) { c.p.kv_dtype = attune_dtype(99); }, {"kv_dtype is 99", "ATTUNE_F32"}},
    {"o_dtype", [](Call &c) { c.p.o_dtype = ATTUNE_I64; }, {"o_dtype is 4", "ATTUNE_F32"}},
    {"negative dtype", [](Call &c) { c.p.q_dtype = attune_dtype(-1); }, {"q_dtype is", "ATTUNE_F32"}},
    {"device", [](Call &c) { c.p.device = attune_device(7); }, {"problem.device is 7", "ATTUNE_CPU"}},
    {"B", [](Call &c) { c.p.B = -1; }, {"problem.B is -1", "expected 0 or more"}},
    {"Hq", [](Call &c) { c.p.Hq = -8; }, {"problem.Hq is -8", "expected"}},
    {"N", [](Call &c) { c.p.N = -3; }, {"problem.N is -3", "expected"}},
    {"M", [](Call &c) { c.p.M = INT64_MIN; }, {"problem.M is -9223372036854775808", "expected"}},
    {"dv", [](Call &c) { c.p.dv = -64; }, {"problem.dv is -64", "expected"}},
    {"dk = 0", [](Call &c) { c.p.dk = 0; }, {"problem.dk is 0", "expected 1 or more"}},
    {"dk", [](Call &c) { c.p.dk = -5; }, {"problem.dk is -5", "expected 1 or more"}},
    {"Hkv = 0", [](Call &c) { c.p.Hkv = 0; }, {"problem.Hkv is 0", "expected 1 or more"}},
    {"Hkv", [](Call &c) { c.p.Hkv = -2; }, {"problem.Hkv is -2", "expected"}},
    {"Hkv with no query head", [](Call &c) { c.p.Hq = 0, c.p.Hkv = -2; }, {"problem.Hkv is -2", "expected"}},
    {"Hq % Hkv", [](Call &c) { c.p.Hkv = 3; }, {"Hq is 4", "Hkv is 3", "multiple"}},
    {"Hkv above Hq", [](Call &c) { c.p.Hkv = 8; }, {"Hq is 4", "Hkv is 8", "multiple"}},
    {"too many elements",
     [](Call &c) { c.p.N = c.p.B = int64_t(1) << 40; },
     {"problem sizes", "1099511627776", "2^62"}},
    {"most elements", [](Call &c) { c.p.M = INT64_MAX; }, {"problem sizes", "9223372036854775807", "2^62"}},
    {"flags", [](Call &c) { c.p.flags |= 1u << 29; }, {"problem.flags is 0x2", "expected"}},
    {"scale NaN", [](Call &c) { c.p.flags |= ATTUNE_SCALE, c.p.scale = kNaN; }, {"problem.scale is nan", "finite"}},
    {"scale infinite",
     [](Call &c) { c.p.flags |= ATTUNE_SCALE, c.p.scale = -kInf; },
     {"problem.scale is -inf", "finite"}},
    {"softcap 0", [](Call &c) { c.p.flags |= ATTUNE_SOFTCAP, c.p.softcap = 0; }, {"problem.softcap is 0", "above 0"}},
    {"softcap", [](Call &c) { c.p.flags |= ATTUNE_SOFTCAP, c.p.softcap = -2; }, {"problem.softcap is -2", "above 0"}},
    {"softcap NaN", [](Call &c) { c.p.flags |= ATTUNE_SOFTCAP, c.p.softcap = kNaN; }, {"problem.softcap is nan"}},
    {"softcap infinite", [](Call &c) { c.p.flags |= ATTUNE_SOFTCAP, c.p.softcap = kInf; }, {"problem.softcap is inf"}},
    {"window_left", [](Call &c) { c.p.window_left = -2; }, {"problem.window_left is -2", "-1 (unbounded)"}},
    {"window_right", [](Call &c) { c.p.window_right = INT64_MIN; }, {"problem.window_right is -9223372036854775808"}},
    {"offset", [](Call &c) { c.p.offset = INT64_MAX; }, {"problem.offset is 9223372036854775807", "2^60"}},
    {"offset below", [](Call &c) { c.p.offset = INT64_MIN; }, {"problem.offset is -9223372036854775808", "2^60"}},
    {"scores_stage",
     [](Call &c) { c.p.flags |= ATTUNE_SCORES, c.p.scores_stage = attune_scores_stage(9); },
     {"problem.scores_stage is 9", "ATTUNE_SCORES_RAW"}},
    {"options.struct_size",
     [](Call &c) { c.options.struct_size = 1; },
     {"options.struct_size is 1", "attune_plan_options_init"}},
    {"options.threads", [](Call &c) { c.options.threads = -1; }, {"options.threads is -1", "expected 0"}},
    {"options.threads above", [](Call &c) { c.options.threads = 5000; }, {"options.threads is 5000", "1024"}},
    {"options.kernel",
     [](Call &c) { c.options.kernel = "attn_nothing"; },
     {"options.kernel is 'attn_nothing'", "no kernel"}},
    {"options.kernel empty", [](Call &c) { c.options.kernel = ""; }, {"options.kernel is ''"}},
    {"options.strategy",
     [](Call &c) { c.options.strategy = "flush"; },
     {"options.strategy is 'flush'", "expected one of"}},
};

// Changes that attune_run has to find.
std::vector<Mutation> wrong_runs() {
    std::vector<Mutation> all = {
        {"null plan", [](Call &c) { c.null_plan = true; }, {"plan is null", "attune_plan_create"}},
        {"null tensors", [](Call &c) { c.null_tensors = true; }, {"tensors is null", "expected"}},
        {"struct_size", [](Call &c) { c.t.struct_size = 3; }, {"tensors.struct_size is 3", "attune_tensors_init"}},
        {"M of K is not M of V", [](Call &c) { c.t.v.shape[2] -= 1; }, {"tensors.v.shape is", "expected"}},
        {"dv of O", [](Call &c) { c.t.o.shape[3] = 1; }, {"tensors.o.shape is", "expected"}},
        {"mask missing", [](Call &c) { c.t.mask = nullptr; }, {"tensors.mask is null", "ATTUNE_MASK"}},
        {"bias missing", [](Call &c) { c.t.bias = nullptr; }, {"tensors.bias is null", "ATTUNE_BIAS"}},
        {"kv_len missing", [](Call &c) { c.t.kv_len = nullptr; }, {"tensors.kv_len is null", "ATTUNE_KV_LEN"}},
        {"offsets missing", [](Call &c) { c.t.offsets = nullptr; }, {"tensors.offsets is null", "ATTUNE_OFFSETS"}},
        {"sinks missing", [](Call &c) { c.t.sinks = nullptr; }, {"tensors.sinks is null", "ATTUNE_SINK"}},
        {"scores not asked for", [](Call &c) { c.t.scores = &c.scores; }, {"tensors.scores is given", "ATTUNE_SCORES"}},
        {"slopes not asked for",
         [](Call &c) {
             static const float slopes[4] = {};
             c.t.alibi_slopes = slopes;
         },
         {"tensors.alibi_slopes is given", "ATTUNE_ALIBI"}},
        {"kv_len negative", [](Call &c) { c.kv_len[1] = -1; }, {"tensors.kv_len[1] is -1", "expected 0 to M"}},
        {"kv_len above M", [](Call &c) { c.kv_len[0] = 71; }, {"tensors.kv_len[0] is 71", "70"}},
        {"offset", [](Call &c) { c.offsets[1] = INT64_MIN; }, {"tensors.offsets[1] is -9223372036854775808", "2^60"}},
        {"null workspace", [](Call &c) { c.null_workspace = true; }, {"workspace is null", "expected"}},
        {"workspace one byte short", [](Call &c) { c.workspace_less = 1; }, {"workspace_size is", "expected at least"}},
        {"mask dtype", [](Call &c) { c.mask.dtype = ATTUNE_F32; }, {"tensors.mask.dtype is f32", "expected u8"}},
        {"mask shape", [](Call &c) { c.mask.shape[1] = 1; }, {"tensors.mask.shape is", "expected"}},
        {"mask null", [](Call &c) { c.mask.data = nullptr; }, {"tensors.mask.data is null", "expected"}},
        {"bias dtype", [](Call &c) { c.bias.dtype = ATTUNE_U8; }, {"tensors.bias.dtype is u8", "expected f32"}},
        {"bias shape", [](Call &c) { c.bias.shape[3] = 69; }, {"tensors.bias.shape is", "69", "70"}},
        {"bias null", [](Call &c) { c.bias.data = nullptr; }, {"tensors.bias.data is null", "expected"}},
        {"lse shape", [](Call &c) { c.lse.shape[3] = 2; }, {"tensors.lse.shape is", "expected"}},
        {"lse dtype", [](Call &c) { c.lse.dtype = ATTUNE_BF16; }, {"tensors.lse.dtype is bf16", "expected f32"}},
        {"lse null", [](Call &c) { c.lse.data = nullptr; }, {"tensors.lse.data is null", "expected"}},
        {"lse stride 0", [](Call &c) { c.lse.stride[2] = 0; }, {"tensors.lse.stride[2] is 0", "expected"}},
        {"O stride 0", [](Call &c) { c.t.o.stride[3] = 0; }, {"tensors.o.stride[3] is 0", "expected"}},
        {"O batch stride 0", [](Call &c) { c.t.o.stride[0] = 0; }, {"tensors.o.stride[0] is 0", "expected"}},
    };
    const std::pair<const char *, attune_tensor attune_tensors::*> kTensors[] = {{"tensors.q", &attune_tensors::q},
                                                                                 {"tensors.k", &attune_tensors::k},
                                                                                 {"tensors.v", &attune_tensors::v},
                                                                                 {"tensors.o", &attune_tensors::o}};
    for (const auto &[argument, member] : kTensors) {
        const std::string a = argument;
        const auto m = member;
        for (int dim = 0; dim < 4; dim++) {
            all.push_back({"shape", [=](Call &c) { (c.t.*m).shape[dim] += 1; }, {a + ".shape is", "expected"}});
            all.push_back({"shape 0", [=](Call &c) { (c.t.*m).shape[dim] = 0; }, {a + ".shape is", "expected"}});
            all.push_back({"shape negative", [=](Call &c) { (c.t.*m).shape[dim] = -1; }, {a + ".shape is", "-1"}});
            all.push_back({"stride that overflows",
                           [=](Call &c) { (c.t.*m).stride[dim] = INT64_MAX / 4; },
                           {a + ".stride is", "63 bits"}});
            all.push_back(
                {"least stride", [=](Call &c) { (c.t.*m).stride[dim] = INT64_MIN; }, {a + ".stride is", "63 bits"}});
        }
        all.push_back({"null data", [=](Call &c) { (c.t.*m).data = nullptr; }, {a + ".data is null", "expected"}});
        all.push_back({"data that is not aligned to an element",
                       [=](Call &c) { (c.t.*m).data = static_cast<char *>((c.t.*m).data) + 1; },
                       {a + ".data is", "4-byte"}});
        all.push_back({"dtype", [=](Call &c) { (c.t.*m).dtype = ATTUNE_F16; }, {a + ".dtype is f16", "expected f32"}});
        all.push_back(
            {"no dtype", [=](Call &c) { (c.t.*m).dtype = attune_dtype(77); }, {a + ".dtype is", "expected f32"}});
        all.push_back({"device", [=](Call &c) { (c.t.*m).device = ATTUNE_CUDA; }, {a + ".device is 3", "expected 0"}});
    }
    return all;
}

const char *const kCase = "f32:b2:h4/2:n30:m70:d64:causal:offset=30,31:kvlen=70,50:mask=bool:mask=bias:sink";

Call right_call(Bed &bed) {
    Call c{};
    c.p = bed.p;
    attune_plan_options_init(&c.options);
    c.t = bed.tensors();
    c.mask = bed.mask.t;
    c.bias = bed.bias.t;
    c.lse = bed.lse.t;
    c.scores = bed.bias.t;
    c.kv_len = bed.kv_len;
    c.offsets = bed.offsets;
    return c;
}

// The pointers that lead to the call's own copies.
void connect(Call &c) {
    c.t.mask = &c.mask;
    c.t.bias = &c.bias;
    c.t.lse = &c.lse;
    c.t.kv_len = c.kv_len.data();
    c.t.offsets = c.offsets.data();
}

void expect_refusal(const Mutation &m, attune_status status) {
    EXPECT_EQ(status, m.status) << m.name << ": " << attune_status_string(status);
    const std::string message = attune_last_error();
    for (const std::string &word : m.words)
        EXPECT_NE(message.find(word), std::string::npos) << m.name << ": '" << message << "' lacks '" << word << "'";
}

TEST_F(Contract_3_14, wrong_problems) {
    Bed bed(parse_case(kCase), 1);
    for (const Mutation &m : kWrongProblems) {
        Call c = right_call(bed);
        m.change(c);
        attune_plan *const sentinel = reinterpret_cast<attune_plan *>(&bed);
        attune_plan *plan = sentinel;
        const attune_status status =
            attune_plan_create(c.null_problem ? nullptr : &c.p, &c.options, c.null_plan_out ? nullptr : &plan);
        expect_refusal(m, status);
        EXPECT_EQ(plan, c.null_plan_out ? sentinel : nullptr) << m.name << ": *plan must be null after a failure";
        if (status == ATTUNE_OK) attune_plan_destroy(plan);
    }
}

// For the planner's kernel and one of each strategy: which checks are made must not depend on who would run.
TEST_F(Contract_3_14, wrong_runs) {
    Bed bed(parse_case(kCase), 1);
    std::vector<std::string> names = {""};
    for (const std::string &strategy : all_strategies())
        for (const attune_kernel *k : kernels_under_test())
            if (k->strategy == strategy && !attune_kernel_refuses(k, &bed.p)) {
                names.push_back(k->name);
                break;
            }
    EXPECT_GT(names.size(), 3u);
    for (const std::string &name : names) {
        SCOPED_TRACE(name);
        std::string why;
        const Plan plan = make_plan(bed.p, name, "", 2, why);
        ASSERT_TRUE(plan) << why;
        const size_t size = attune_plan_workspace(plan.get());
        const Workspace workspace(device_under_test(), size, Guard::end);
        // Unchanged, the call is right.
        Call right = right_call(bed);
        connect(right);
        ASSERT_EQ(attune_run(plan.get(), &right.t, workspace.data(), size), ATTUNE_OK) << attune_last_error();
        for (const Mutation &m : wrong_runs()) {
            Call c = right_call(bed);
            connect(c);
            m.change(c);
            if (c.null_workspace && size == 0) continue;
            const Running running_now(fmt::format("kernel '{}', wrong argument: {}", name, m.name));
            bed.reset_outputs();
            const attune_status status =
                attune_run(c.null_plan ? nullptr : plan.get(), c.null_tensors ? nullptr : &c.t,
                           c.null_workspace ? nullptr : workspace.data(), size - c.workspace_less);
            expect_refusal(m, status);
            EXPECT_TRUE(bed.o.all_pattern() && bed.lse.all_pattern()) << m.name << ": it wrote";
        }
        // And after all that, the plan still works.
        bed.reset_outputs();
        ASSERT_EQ(attune_run(plan.get(), &right.t, workspace.data(), size), ATTUNE_OK) << attune_last_error();
        EXPECT_TRUE(check_outputs(bed.reference(), right.t).ok);
    }
}

// Flags that are not set, tensors that are given all the same.
TEST_F(Contract_3_14, tensors_that_were_not_asked_for) {
    Bed plain(parse_case("f32:b2:h4/2:n30:m70:d64"), 1), bed(parse_case(kCase), 1);
    std::string why;
    const Plan plan = make_plan(plain.p, "", "", 1, why);
    ASSERT_TRUE(plan) << why;
    const Workspace workspace(device_under_test(), attune_plan_workspace(plan.get()), Guard::end);
    const Mutation kGiven[] = {
        {"mask", [&](Call &c) { c.t.mask = &bed.mask.t; }, {"tensors.mask is given", "ATTUNE_MASK"}},
        {"bias", [&](Call &c) { c.t.bias = &bed.bias.t; }, {"tensors.bias is given", "ATTUNE_BIAS"}},
        {"kv_len", [&](Call &c) { c.t.kv_len = bed.kv_len.data(); }, {"tensors.kv_len is given", "ATTUNE_KV_LEN"}},
        {"offsets", [&](Call &c) { c.t.offsets = bed.offsets.data(); }, {"tensors.offsets is given", "ATTUNE_OFFSETS"}},
        {"sinks", [&](Call &c) { c.t.sinks = bed.sinks.data(); }, {"tensors.sinks is given", "ATTUNE_SINK"}},
    };
    for (const Mutation &m : kGiven) {
        Call c{};
        c.t = plain.tensors();
        m.change(c);
        plain.reset_outputs();
        expect_refusal(m, attune_run(plan.get(), &c.t, workspace.data(), workspace.size()));
        EXPECT_TRUE(plain.o.all_pattern() && plain.lse.all_pattern()) << m.name << ": it wrote";
    }
}

// Nothing crashes on null or nonsense elsewhere in the interface.
TEST_F(Contract_3_14, null_everywhere) {
    attune_problem_init(nullptr);
    attune_tensors_init(nullptr);
    attune_plan_options_init(nullptr);
    attune_plan_destroy(nullptr);
    EXPECT_EQ(attune_plan_workspace(nullptr), 0u);
    EXPECT_EQ(attune_plan_scratch(nullptr), 0u);
    EXPECT_STREQ(attune_plan_kernel(nullptr), "");
    EXPECT_STREQ(attune_plan_explain(nullptr), "");
    EXPECT_EQ(attune_plan_problem(nullptr), nullptr);
    EXPECT_EQ(attune_find_kernel(nullptr), nullptr);
    EXPECT_EQ(attune_find_kernel("attn_nothing"), nullptr);
    EXPECT_EQ(attune_kernel_at(-1), nullptr);
    EXPECT_EQ(attune_kernel_at(attune_num_kernels()), nullptr);
    EXPECT_EQ(attune_kernel_at(INT64_MAX), nullptr);
    EXPECT_STRNE(attune_kernel_refuses(nullptr, nullptr), "");
    EXPECT_STRNE(attune_status_string(attune_status(99)), "");
    EXPECT_STRNE(attune_status_string(ATTUNE_OK), "");
    EXPECT_STRNE(attune_dtype_string(attune_dtype(99)), "");
    EXPECT_STREQ(attune_dtype_string(ATTUNE_BF16), "bf16");
    EXPECT_STRNE(attune_version(), "");
    EXPECT_EQ(attune_last_phase_seconds(nullptr, 0), attune_last_phase_seconds(nullptr, -5));
}

// A problem that nobody validated must not crash the question who could do it.
TEST_F(Contract_3_14, refusal_of_unchecked_problems) {
    Bed bed(parse_case(kCase), 1);
    for (const Mutation &m : kWrongProblems) {
        Call c = right_call(bed);
        m.change(c);
        for (const attune_kernel *k : all_kernels()) {
            const char *reason = attune_kernel_refuses(k, &c.p);
            EXPECT_TRUE(!reason || *reason) << m.name;
        }
    }
}

TEST_F(Contract_3_14, threads) {
    const int before = attune_get_num_threads();
    EXPECT_EQ(attune_set_num_threads(-1), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("threads is -1"), std::string::npos) << attune_last_error();
    EXPECT_EQ(attune_set_num_threads(4096), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("threads is 4096"), std::string::npos) << attune_last_error();
    EXPECT_EQ(attune_get_num_threads(), before);
    EXPECT_EQ(attune_set_num_threads(3), ATTUNE_OK);
    EXPECT_EQ(attune_get_num_threads(), 3);
    EXPECT_EQ(attune_set_num_threads(0), ATTUNE_OK);
    EXPECT_EQ(attune_get_num_threads(), before);
}

TEST_F(Contract_3_14, registering_kernels) {
    const attune_kernel good = *kernels_under_test()[0];
    const int64_t before = attune_num_kernels();
    EXPECT_EQ(attune_register_kernel(nullptr), ATTUNE_INVALID_ARGUMENT);
    const std::tuple<const char *, std::function<void(attune_kernel &)>, std::string> kWrong[] = {
        {"struct_size", [](attune_kernel &k) { k.struct_size--; }, "struct_size"},
        {"abi", [](attune_kernel &k) { k.abi = 77; }, "abi is 77"},
        {"name", [](attune_kernel &k) { k.name = nullptr; }, "name"},
        {"strategy", [](attune_kernel &k) { k.strategy = nullptr; }, "strategy"},
        {"isa", [](attune_kernel &k) { k.isa = "z80"; }, "z80"},
        {"phases", [](attune_kernel &k) { k.num_phases = 0; }, "num_phases is 0"},
        {"same name", [](attune_kernel &) {}, good.name},
    };
    for (const auto &[name, change, word] : kWrong) {
        attune_kernel k = good;
        change(k);
        EXPECT_EQ(attune_register_kernel(&k), ATTUNE_INVALID_ARGUMENT) << name;
        EXPECT_NE(std::string(attune_last_error()).find(word), std::string::npos)
            << name << ": " << attune_last_error();
    }
    EXPECT_EQ(attune_num_kernels(), before);
}

// The message is the calling thread's own, and that of its last failure.
TEST_F(Contract_3_14, last_error) {
    attune_plan *plan = nullptr;
    attune_problem p = to_problem(parse_case("f32:b1:h1:n1:m1:d1"));
    p.B = -7;
    EXPECT_NE(attune_plan_create(&p, nullptr, &plan), ATTUNE_OK);
    EXPECT_NE(std::string(attune_last_error()).find("-7"), std::string::npos);
    p.B = -8;
    EXPECT_NE(attune_plan_create(&p, nullptr, &plan), ATTUNE_OK);
    EXPECT_NE(std::string(attune_last_error()).find("-8"), std::string::npos);
}

} // namespace
} // namespace attune::contract
