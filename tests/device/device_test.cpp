// The device layer: devices and their memory, tensors that stay on a device, a caller's own context and queue, and what
// goes wrong. Each test runs for each device that there is here; kernels themselves are the contract suite's.
#include "attune/device.h"
#include "attune/kernel.h"
#include "lib/device_memory.h"
#include "lib/inputs.h"
#include "lib/reference.h"
#include "lib/runner.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <numeric>
#include <thread>
#include <vector>

namespace attune {
namespace {

using namespace tools;

class DeviceTest : public ::testing::TestWithParam<attune_device> {
  protected:
    void SetUp() override {
        int64_t count = 0;
        if (attune_device_count(GetParam(), &count) != ATTUNE_OK) GTEST_SKIP() << attune_last_error();
    }
    attune_device device() const { return GetParam(); }
    attune_device_info info() const {
        int64_t count = 0;
        attune_device_count(device(), &count);
        attune_device_info x;
        for (int64_t i = 0; i < count; i++) {
            attune_device_info_init(&x);
            if (attune_device_describe(device(), i, &x) == ATTUNE_OK && x.is_default) return x;
        }
        ADD_FAILURE() << "no device is the default one";
        return x;
    }
};

std::string name_of(const ::testing::TestParamInfo<attune_device> &i) {
    return device_name(i.param);
}
INSTANTIATE_TEST_SUITE_P(All, DeviceTest, ::testing::Values(ATTUNE_OPENCL, ATTUNE_VULKAN, ATTUNE_CUDA), name_of);

std::vector<unsigned char> numbers(size_t n, unsigned seed) {
    std::vector<unsigned char> x(n);
    for (size_t i = 0; i < n; i++) x[i] = static_cast<unsigned char>(i * 31 + i / 251 + seed);
    return x;
}

TEST_P(DeviceTest, has_a_name_and_limits) {
    const attune_device_info x = info();
    EXPECT_GT(std::strlen(x.name), 0u);
    EXPECT_GT(x.memory_bytes, 1 << 20);
    EXPECT_GT(x.max_buffer_bytes, 1 << 20);
    EXPECT_GE(x.shared_bytes, 16 * 1024);
    EXPECT_GE(x.max_threads, 128);
    attune_device_info other;
    attune_device_info_init(&other);
    EXPECT_EQ(attune_device_describe(device(), 1000, &other), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("1000"), std::string::npos);
}

// Every length and offset, whole words or not: nothing beside them changes.
TEST_P(DeviceTest, copies_take_any_length_at_any_offset) {
    constexpr size_t kBytes = 3000;
    DeviceMemory memory(device(), kBytes);
    std::vector<unsigned char> expected = numbers(kBytes, 1), got(kBytes);
    ASSERT_EQ(attune_device_copy_in(device(), memory.data(), expected.data(), kBytes), ATTUNE_OK);
    for (size_t offset : {0, 1, 63, 64, 256, 1000, 2935})
        for (size_t n : {1, 3, 63, 64, 65, 500}) {
            if (offset + n > kBytes) continue;
            const auto patch = numbers(n, unsigned(offset + n));
            ASSERT_EQ(attune_device_copy_in(device(), memory.data() + offset, patch.data(), n), ATTUNE_OK)
                << attune_last_error();
            std::copy(patch.begin(), patch.end(), expected.begin() + std::ptrdiff_t(offset));
            ASSERT_EQ(attune_device_copy_out(device(), got.data(), memory.data(), kBytes), ATTUNE_OK);
            ASSERT_EQ(got, expected) << n << " bytes at " << offset;
            std::vector<unsigned char> part(n);
            ASSERT_EQ(attune_device_copy_out(device(), part.data(), memory.data() + offset, n), ATTUNE_OK);
            ASSERT_EQ(part, patch) << n << " bytes at " << offset;
        }
}

TEST_P(DeviceTest, bad_arguments_of_memory) {
    EXPECT_EQ(attune_device_malloc(device(), 16, nullptr), ATTUNE_INVALID_ARGUMENT);
    EXPECT_EQ(attune_device_free(device(), nullptr), ATTUNE_OK);
    if (device() == ATTUNE_CUDA) return; // any number may be an address
    DeviceMemory memory(device(), 100);
    char byte = 0;
    EXPECT_EQ(attune_device_copy_out(device(), &byte, &byte, 1), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("attune_device_malloc"), std::string::npos);
    std::vector<char> many(100000);
    EXPECT_EQ(attune_device_copy_in(device(), memory.data(), many.data(), many.size()), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("100000"), std::string::npos);
    EXPECT_EQ(attune_device_free(device(), memory.data() + 4), ATTUNE_INVALID_ARGUMENT);
    attune_device_queue queue{sizeof(attune_device_queue), device(), nullptr, nullptr};
    EXPECT_EQ(attune_device_use_queue(&queue), ATTUNE_INVALID_ARGUMENT);
}

// No room: a status, and what was there before is unharmed and still works.
TEST_P(DeviceTest, out_of_memory_is_a_status) {
    DeviceMemory before(device(), 5000);
    const auto bytes = numbers(5000, 7);
    ASSERT_EQ(attune_device_copy_in(device(), before.data(), bytes.data(), bytes.size()), ATTUNE_OK);
    void *address = nullptr;
    EXPECT_EQ(attune_device_malloc(device(), size_t(1) << 60, &address), ATTUNE_OUT_OF_MEMORY);
    EXPECT_EQ(address, nullptr);
    EXPECT_NE(std::string(attune_last_error()).find("1152921504606846976"), std::string::npos) << attune_last_error();
    std::vector<unsigned char> got(5000);
    ASSERT_EQ(attune_device_copy_out(device(), got.data(), before.data(), got.size()), ATTUNE_OK);
    EXPECT_EQ(got, bytes);
    DeviceMemory after(device(), 5000);
}

Plan plan_for(attune_problem p, attune_device device) {
    p.device = device;
    std::string why;
    Plan plan = make_plan(p, "", "", 1, why);
    EXPECT_TRUE(plan) << why;
    return plan;
}

// Tensors that stay: nothing is copied but what is asked for, and views into the middle of buffers work.
TEST_P(DeviceTest, tensors_stay_on_the_device) {
    const Case c = parse_case("f32:b2:h4/2:n37:m75:d64:causal-br:mask=bias");
    Inputs inputs(c, {});
    const Plan plan = plan_for(inputs.problem(), device());
    ASSERT_TRUE(plan);
    const Workspace workspace(device(), attune_plan_workspace(plan.get()), Guard::none);
    const Reference reference = make_reference(inputs.problem(), inputs.tensors());
    inputs.reset_outputs();
    ASSERT_EQ(attune_run(plan.get(), &inputs.tensors(), workspace.data(), workspace.size()), ATTUNE_OK)
        << attune_last_error();
    EXPECT_TRUE(check_outputs(reference, inputs.tensors()).ok) << check_outputs(reference, inputs.tensors()).why;
    const uint64_t bits = inputs.output_hash();

    DeviceTensors there(device(), inputs.tensors());
    there.fill_outputs(0xff);
    inputs.reset_outputs();
    for (int n = 0; n < 2; n++)
        ASSERT_EQ(attune_run(plan.get(), &there.tensors(), workspace.data(), workspace.size()), ATTUNE_OK)
            << attune_last_error();
    ASSERT_EQ(attune_device_synchronize(device()), ATTUNE_OK);
    there.fetch_outputs();
    EXPECT_EQ(inputs.output_hash(), bits);

    // Q on the device, K and V on the host; O on the host, LSE on the device.
    attune_tensors mixed = inputs.tensors();
    mixed.q = there.tensors().q;
    mixed.lse = there.tensors().lse;
    there.fill_outputs(0xff);
    inputs.reset_outputs();
    ASSERT_EQ(attune_run(plan.get(), &mixed, workspace.data(), workspace.size()), ATTUNE_OK) << attune_last_error();
    const attune_tensor &lse = *inputs.tensors().lse;
    ASSERT_EQ(attune_device_copy_out(device(), lse.data, mixed.lse->data, size_t(c.B * c.Hq * c.N) * sizeof(float)),
              ATTUNE_OK);
    EXPECT_EQ(inputs.output_hash(), bits);
}

// One buffer for all: Q, K, V and O begin at odd places in it, O between gaps that must stay as they are.
TEST_P(DeviceTest, views_into_one_buffer) {
    const Case c = parse_case("f32:b2:h2:n5:m40:d32:kvlen=40,17");
    Inputs inputs(c, {});
    const Reference reference = make_reference(inputs.problem(), inputs.tensors());
    const Plan plan = plan_for(inputs.problem(), device());
    ASSERT_TRUE(plan);
    const Workspace workspace(device(), attune_plan_workspace(plan.get()), Guard::none);
    constexpr int64_t kFloats = 20000;
    std::vector<float> host(kFloats, -77.0f);
    DeviceMemory memory(device(), kFloats * sizeof(float));
    attune_tensors t = inputs.tensors();
    int64_t at = 3;
    const auto place = [&](attune_tensor &x, int64_t gap) {
        const attune_tensor from = x;
        const int64_t row = x.shape[3] + gap;
        x.stride[3] = 1, x.stride[2] = row, x.stride[1] = row * x.shape[2], x.stride[0] = row * x.shape[2] * x.shape[1];
        for (int64_t b = 0; b < x.shape[0]; b++)
            for (int64_t h = 0; h < x.shape[1]; h++)
                for (int64_t i = 0; i < x.shape[2]; i++)
                    for (int64_t d = 0; d < x.shape[3]; d++)
                        host[size_t(at + b * x.stride[0] + h * x.stride[1] + i * x.stride[2] + d)] =
                            static_cast<const float *>(from.data)[b * from.stride[0] + h * from.stride[1] +
                                                                  i * from.stride[2] + d * from.stride[3]];
        x.data = memory.data() + at * int64_t(sizeof(float));
        x.device = device();
        at += x.stride[0] * x.shape[0] + 5;
        ASSERT_LT(at, kFloats);
    };
    place(t.q, 0);
    place(t.k, 1);
    place(t.v, 3);
    const int64_t o_at = at;
    place(t.o, 2);
    t.lse = nullptr;
    ASSERT_EQ(attune_device_copy_in(device(), memory.data(), host.data(), kFloats * sizeof(float)), ATTUNE_OK);
    ASSERT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK) << attune_last_error();
    std::vector<float> got(kFloats);
    ASSERT_EQ(attune_device_copy_out(device(), got.data(), memory.data(), kFloats * sizeof(float)), ATTUNE_OK);
    attune_tensors back = t;
    back.o.data = got.data() + o_at;
    EXPECT_TRUE(check_outputs(reference, back).ok) << check_outputs(reference, back).why;
    std::vector<bool> is_o(kFloats);
    for (int64_t b = 0; b < c.B; b++)
        for (int64_t h = 0; h < c.Hq; h++)
            for (int64_t i = 0; i < c.N; i++)
                for (int64_t d = 0; d < c.dv; d++)
                    is_o[size_t(o_at + b * t.o.stride[0] + h * t.o.stride[1] + i * t.o.stride[2] + d)] = true;
    for (size_t n = 0; n < size_t(kFloats); n++)
        if (!is_o[n]) {
            ASSERT_EQ(got[n], host[n]) << "float " << n << " is none of O's";
        }
}

// A device address that is none, and a tensor too large for 32-bit offsets: messages that name them.
TEST_P(DeviceTest, bad_tensors) {
    const Case c = parse_case("f32:b1:h2:n5:m40:d32");
    Inputs inputs(c, {});
    const Plan plan = plan_for(inputs.problem(), device());
    ASSERT_TRUE(plan);
    const Workspace workspace(device(), attune_plan_workspace(plan.get()), Guard::none);
    DeviceTensors there(device(), inputs.tensors());
    attune_tensors t = there.tensors();
    t.k.stride[2] = int64_t(1) << 40;
    EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_UNSUPPORTED);
    EXPECT_NE(std::string(attune_last_error()).find("tensors.k"), std::string::npos) << attune_last_error();
    EXPECT_NE(std::string(attune_last_error()).find("1099511627776"), std::string::npos) << attune_last_error();
    t = there.tensors();
    t.q.device = device() == ATTUNE_VULKAN ? ATTUNE_OPENCL : ATTUNE_VULKAN;
    EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_INVALID_ARGUMENT);
    if (device() == ATTUNE_CUDA) return;
    t = there.tensors();
    t.v.data = inputs.tensors().v.data; // the host's, said to be the device's
    EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(attune_last_error()).find("tensors.v"), std::string::npos) << attune_last_error();
}

// Four threads, one plan, each its own tensors.
TEST_P(DeviceTest, threads_share_a_plan) {
    const Case c = parse_case("f32:b1:h2:n20:m60:d64:causal-br");
    Inputs first(c, {});
    const Plan plan = plan_for(first.problem(), device());
    ASSERT_TRUE(plan);
    std::vector<std::string> wrong(4);
    std::vector<std::thread> threads;
    for (size_t n = 0; n < wrong.size(); n++)
        threads.emplace_back([&, n] {
            InputOptions options;
            options.seed = n;
            Inputs inputs(c, options);
            const Reference reference = make_reference(inputs.problem(), inputs.tensors());
            const Workspace workspace(device(), attune_plan_workspace(plan.get()), Guard::none);
            for (int r = 0; r < 3 && wrong[n].empty(); r++) {
                inputs.reset_outputs();
                if (attune_run(plan.get(), &inputs.tensors(), workspace.data(), workspace.size()) != ATTUNE_OK)
                    wrong[n] = attune_last_error();
                else
                    wrong[n] = check_outputs(reference, inputs.tensors()).why;
            }
        });
    for (std::thread &t : threads) t.join();
    for (const std::string &w : wrong) EXPECT_EQ(w, "");
}

// A caller's own OpenCL context, queue and buffer.
TEST(CallersOpenClQueue, works) {
    int64_t count = 0;
    if (attune_device_count(ATTUNE_OPENCL, &count) != ATTUNE_OK) GTEST_SKIP() << attune_last_error();
    void *library = dlopen("libOpenCL.so.1", RTLD_NOW);
    ASSERT_NE(library, nullptr);
    const auto function = [library]<typename F>(F *&f, const char *name) {
        f = reinterpret_cast<F *>(dlsym(library, name));
    };
    int (*platforms)(unsigned, void **, unsigned *) = nullptr;
    int (*devices)(void *, uint64_t, unsigned, void **, unsigned *) = nullptr;
    void *(*create_context)(const void *, unsigned, void *const *, void *, void *, int *) = nullptr;
    void *(*create_queue)(void *, void *, uint64_t, int *) = nullptr;
    void *(*create_buffer)(void *, uint64_t, size_t, void *, int *) = nullptr;
    int (*write)(void *, void *, unsigned, size_t, size_t, const void *, unsigned, const void *, void *) = nullptr;
    int (*release)(void *) = nullptr;
    function(platforms, "clGetPlatformIDs");
    function(devices, "clGetDeviceIDs");
    function(create_context, "clCreateContext");
    function(create_queue, "clCreateCommandQueue");
    function(create_buffer, "clCreateBuffer");
    function(write, "clEnqueueWriteBuffer");
    function(release, "clReleaseMemObject");
    void *platform = nullptr, *id = nullptr;
    unsigned n = 0;
    ASSERT_EQ(platforms(1, &platform, &n), 0);
    ASSERT_EQ(devices(platform, 0xffffffff, 1, &id, &n), 0);
    int error = 0;
    void *context = create_context(nullptr, 1, &id, nullptr, nullptr, &error);
    ASSERT_NE(context, nullptr) << error;
    void *queue = create_queue(context, id, 0, &error);
    ASSERT_NE(queue, nullptr) << error;

    attune_device_queue theirs{sizeof(attune_device_queue), ATTUNE_OPENCL, context, queue};
    ASSERT_EQ(attune_device_use_queue(&theirs), ATTUNE_OK) << attune_last_error();
    const Case c = parse_case("f32:b1:h2:n20:m60:d64:causal-br");
    Inputs inputs(c, {});
    const Reference reference = make_reference(inputs.problem(), inputs.tensors());
    const Plan plan = plan_for(inputs.problem(), ATTUNE_OPENCL);
    ASSERT_TRUE(plan);
    {
        const Workspace workspace(ATTUNE_OPENCL, attune_plan_workspace(plan.get()), Guard::none);
        // K is a buffer that the caller has made and filled, 64 floats into it.
        const size_t bytes = size_t(c.Hkv * c.M * c.dk) * sizeof(float);
        void *buffer = create_buffer(context, 1, bytes + 512, nullptr, &error);
        ASSERT_NE(buffer, nullptr) << error;
        ASSERT_EQ(write(queue, buffer, 1, 256, bytes, inputs.tensors().k.data, 0, nullptr, nullptr), 0);
        void *address = nullptr;
        ASSERT_EQ(attune_device_import(ATTUNE_OPENCL, buffer, bytes + 512, &address), ATTUNE_OK);
        attune_tensors t = inputs.tensors();
        t.k.data = static_cast<char *>(address) + 256;
        t.k.device = ATTUNE_OPENCL;
        inputs.reset_outputs();
        EXPECT_EQ(attune_run(plan.get(), &t, workspace.data(), workspace.size()), ATTUNE_OK) << attune_last_error();
        EXPECT_TRUE(check_outputs(reference, inputs.tensors()).ok) << check_outputs(reference, inputs.tensors()).why;
        EXPECT_EQ(attune_device_free(ATTUNE_OPENCL, address), ATTUNE_OK);
        EXPECT_EQ(release(buffer), 0);
        EXPECT_EQ(attune_device_trim(ATTUNE_OPENCL), ATTUNE_OK);
    }
    ASSERT_EQ(attune_device_use_default(ATTUNE_OPENCL), ATTUNE_OK);
    const Workspace workspace(ATTUNE_OPENCL, attune_plan_workspace(plan.get()), Guard::none);
    inputs.reset_outputs();
    EXPECT_EQ(attune_run(plan.get(), &inputs.tensors(), workspace.data(), workspace.size()), ATTUNE_OK)
        << attune_last_error();
    EXPECT_TRUE(check_outputs(reference, inputs.tensors()).ok);
}

TEST(Devices, unknown_number) {
    int64_t count = 7;
    for (int number : {-1, 0, 4, 99}) {
        EXPECT_EQ(attune_device_count(attune_device(number), &count), ATTUNE_INVALID_ARGUMENT);
        EXPECT_NE(std::string(attune_last_error()).find(fmt::format("device is {}", number)), std::string::npos);
        EXPECT_EQ(count, 0);
    }
}

// Nothing else stands in for a kernel that cannot: the plan fails, with a reason for each kernel.
TEST(Devices, no_other_kernel_stands_in) {
    attune_problem p = to_problem(parse_case("f32:b1:h2:n20:m60:d64"));
    for (attune_device device : {ATTUNE_OPENCL, ATTUNE_VULKAN, ATTUNE_CUDA}) {
        p.device = device;
        p.q_dtype = p.kv_dtype = p.o_dtype = ATTUNE_BF16; // which no device kernel made by Halide does
        attune_plan *plan = nullptr;
        attune_plan_options options;
        attune_plan_options_init(&options);
        options.strategy = "gpu_block";
        EXPECT_EQ(attune_plan_create(&p, &options, &plan), ATTUNE_UNSUPPORTED);
        const std::string message = attune_last_error();
        for (const attune_kernel *k : all_kernels())
            EXPECT_NE(message.find(fmt::format("{}: ", k->name)), std::string::npos) << k->name << " has no reason";
        EXPECT_EQ(plan, nullptr);
        p.q_dtype = p.kv_dtype = p.o_dtype = ATTUNE_F32;
        options.strategy = nullptr;
        if (attune_plan_create(&p, &options, &plan) == ATTUNE_OK) {
            EXPECT_EQ(attune_find_kernel(attune_plan_kernel(plan))->device, device);
        }
        attune_plan_destroy(plan);
    }
}

} // namespace
} // namespace attune
