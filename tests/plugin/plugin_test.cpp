// attune_load_kernels: what is refused, with which reason, and that nothing of a refused plug-in is registered.
#include "attune/kernel.h"

#include "cpu_features.h"
#include "registry.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>

namespace {

attune_status refused(const char *path, const std::string &reason) {
    const int64_t before = attune_num_kernels();
    const attune_status status = attune_load_kernels(path);
    EXPECT_NE(status, ATTUNE_OK);
    EXPECT_NE(std::string(attune_last_error()).find(reason), std::string::npos) << attune_last_error();
    EXPECT_EQ(attune_num_kernels(), before);
    return status;
}

TEST(LoadKernels, RefusesWhatIsNoLibrary) {
    EXPECT_EQ(refused(nullptr, "path is null"), ATTUNE_INVALID_ARGUMENT);
    EXPECT_EQ(refused("", "path is ''"), ATTUNE_INVALID_ARGUMENT);
    EXPECT_EQ(refused("none.so", "none.so: cannot be loaded: "), ATTUNE_IO_ERROR);
    EXPECT_EQ(refused("/", "cannot be loaded"), ATTUNE_IO_ERROR);
    EXPECT_EQ(refused(__FILE__, "cannot be loaded"), ATTUNE_IO_ERROR);
    EXPECT_EQ(refused(PLUGIN_0, "has no function attune_plugin"), ATTUNE_INVALID_ARGUMENT);
}

TEST(LoadKernels, RefusesAnotherAbi) {
    EXPECT_EQ(refused(PLUGIN_1, "made for version 4 of the kernel ABI: expected 3"), ATTUNE_UNSUPPORTED);
}

TEST(LoadKernels, RefusesAnIsaThatTheCpuLacks) {
    // Whatever this CPU has: what one with less would say.
    const std::unique_ptr<void, int (*)(void *)> library(dlopen(PLUGIN_2, RTLD_NOW), dlclose);
    ASSERT_TRUE(library) << dlerror();
    const auto *set = reinterpret_cast<const attune_kernel_set *(*)()>(dlsym(library.get(), "attune_plugin"))();
    EXPECT_EQ(attune::rt::plugin_refusal(set, "avx2"),
              "kernel attn_bad_second needs avx512_bf16, which this CPU lacks: it has avx2");
    EXPECT_EQ(attune::rt::plugin_refusal(set, "avx512_bf16"), "");
    if (attune::rt::cpu_has("avx512_bf16")) return;
    EXPECT_EQ(refused(PLUGIN_2, "attn_bad_second needs avx512_bf16, which this CPU lacks"), ATTUNE_UNSUPPORTED);
}

TEST(LoadKernels, RefusesAnUnknownIsaAndANameTwiceAsAWhole) {
    EXPECT_EQ(refused(PLUGIN_3, "kernel->isa is 'tpu'"), ATTUNE_INVALID_ARGUMENT);
    EXPECT_EQ(attune_find_kernel("attn_bad_first_3"), nullptr);
    EXPECT_EQ(refused(PLUGIN_4, "a kernel of that name is registered already"), ATTUNE_INVALID_ARGUMENT);
    EXPECT_EQ(attune_find_kernel("attn_bad_first_4"), nullptr);
    EXPECT_EQ(refused(PLUGIN_4, "a kernel of that name is registered already"), ATTUNE_INVALID_ARGUMENT); // and again
}

} // namespace
