// The .safetensors reader and writer: what is written comes back, and every way in which a file can be wrong is a
// message that says so, never a read outside the file.
#include "runtime/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>

namespace {

using attune::rt::SafetensorsFile;
using attune::rt::write_safetensors;
using testing::HasSubstr;

class Safetensors : public testing::Test {
  protected:
    void SetUp() override {
        directory_ = std::filesystem::temp_directory_path() / ("attune_safetensors_test_" + std::to_string(::getpid()));
        std::filesystem::create_directories(directory_);
    }
    void TearDown() override { std::filesystem::remove_all(directory_); }

    std::string path(const std::string &name = "file.safetensors") const { return (directory_ / name).string(); }

    void write(const std::string &bytes) const {
        std::ofstream stream(path(), std::ios::binary | std::ios::trunc);
        stream.write(bytes.data(), std::streamsize(bytes.size()));
        ASSERT_TRUE(stream.good());
    }

    // A whole file of this header and this many bytes of data.
    static std::string file(const std::string &header, size_t data_bytes) {
        std::string bytes(8, '\0');
        const uint64_t size = header.size();
        std::memcpy(bytes.data(), &size, 8);
        bytes += header;
        for (size_t i = 0; i < data_bytes; i++) bytes += char('a' + i % 26);
        return bytes;
    }

    // The message with which opening fails; "" if it does not.
    std::string error_of(const std::string &bytes) const {
        write(bytes);
        std::string error;
        const auto opened = SafetensorsFile::open(path(), error);
        if (opened) return "";
        EXPECT_THAT(error, HasSubstr(path())) << "every message names the file";
        return error;
    }

    std::filesystem::path directory_;
};

template <class T>
SafetensorsFile::Tensor tensor(const char *dtype, std::vector<int64_t> shape, const std::vector<T> &data) {
    return {dtype, std::move(shape), std::as_bytes(std::span(data)).data(), data.size() * sizeof(T)};
}

TEST_F(Safetensors, WhatIsWrittenComesBack) {
    const std::vector<float> f = {1, 2, 3, 4, 5, 6};
    const std::vector<double> d = {0.1};
    const std::vector<int64_t> i = {-1, 1LL << 40};
    const std::vector<uint8_t> u = {1, 2, 3};
    const std::vector<float> none;
    std::string error;
    ASSERT_TRUE(write_safetensors(path(),
                                  {{"f", tensor("F32", {2, 3}, f)},
                                   {"scalar", tensor("F64", {}, d)},
                                   {"i", tensor("I64", {2}, i)},
                                   {"odd \"name\" \u00e9", tensor("U8", {3, 1}, u)},
                                   {"none", tensor("F32", {0, 7}, none)}},
                                  error))
        << error;
    const auto opened = SafetensorsFile::open(path(), error);
    ASSERT_TRUE(opened) << error;
    EXPECT_EQ(opened->tensors().size(), 5u);
    const auto *t = opened->find("f");
    ASSERT_TRUE(t);
    EXPECT_EQ(t->dtype, "F32");
    EXPECT_EQ(t->shape, (std::vector<int64_t>{2, 3}));
    ASSERT_EQ(t->bytes, 24u);
    EXPECT_EQ(std::memcmp(t->data, f.data(), 24), 0);
    t = opened->require("scalar", "F64", {}, error);
    ASSERT_TRUE(t) << error;
    EXPECT_EQ(std::memcmp(t->data, d.data(), 8), 0);
    t = opened->require("i", "I64", {2}, error);
    ASSERT_TRUE(t) << error;
    EXPECT_EQ(std::memcmp(t->data, i.data(), 16), 0);
    EXPECT_TRUE(opened->require("odd \"name\" \u00e9", "U8", {3, 1}, error)) << error;
    t = opened->require("none", "F32", {0, 7}, error);
    ASSERT_TRUE(t) << error;
    EXPECT_EQ(t->bytes, 0u);
}

TEST_F(Safetensors, TheWriterReplacesWholeFilesOnly) {
    const std::vector<float> f = {1};
    std::string error;
    ASSERT_TRUE(write_safetensors(path(), {{"old", tensor("F32", {1}, f)}}, error)) << error;
    EXPECT_FALSE(write_safetensors(path(), {{"new", tensor("F32", {2}, f)}}, error));
    EXPECT_THAT(error, HasSubstr("tensor 'new': bytes is 4, but F32 [2] needs 8"));
    EXPECT_FALSE(write_safetensors(path(), {{"new", tensor("F31", {1}, f)}}, error));
    EXPECT_THAT(error, HasSubstr("dtype is 'F31': expected one of F64, F32"));
    EXPECT_FALSE(write_safetensors(path(), {{"new", {"F32", {-1}, nullptr, 0}}}, error));
    EXPECT_THAT(error, HasSubstr("shape is [-1]: expected non-negative extents"));
    EXPECT_FALSE(write_safetensors(path(), {{"new", {"F32", {1}, nullptr, 4}}}, error));
    EXPECT_THAT(error, HasSubstr("data is null"));
    EXPECT_FALSE(write_safetensors(path(), {{"\xff", tensor("F32", {1}, f)}}, error));
    EXPECT_THAT(error, HasSubstr("not valid UTF-8"));
    EXPECT_FALSE(write_safetensors(path("no/such/directory"), {{"f", tensor("F32", {1}, f)}}, error));
    EXPECT_THAT(error, HasSubstr("No such file"));
    EXPECT_TRUE(SafetensorsFile::open(path(), error)->find("old"));
    std::filesystem::create_directory(path("directory"));
    EXPECT_FALSE(write_safetensors(path("directory"), {{"f", tensor("F32", {1}, f)}}, error));
    // Nothing is left behind but the two that are meant to be there.
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_), {}), 2);
}

TEST_F(Safetensors, MetadataIsKept) {
    write(file(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 2));
    std::string error;
    const auto opened = SafetensorsFile::open(path(), error);
    ASSERT_TRUE(opened) << error;
    EXPECT_EQ(opened->metadata().at("format"), "pt");
    EXPECT_EQ(opened->tensors().size(), 1u);
}

TEST_F(Safetensors, TensorsAreAlignedWhereverTheFileHasThem) {
    // A header of odd length, and a float behind a single byte.
    write(file(
        R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]} })",
        9));
    std::string error;
    const auto opened = SafetensorsFile::open(path(), error);
    ASSERT_TRUE(opened) << error;
    const auto *b = opened->find("b");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(b->data) % 4, 0u);
    EXPECT_EQ(std::memcmp(b->data, "bcdefghi", 8), 0);
}

TEST_F(Safetensors, ATensorThatIsNotAsExpectedIsNamed) {
    const std::vector<float> f = {1, 2};
    std::string error;
    ASSERT_TRUE(write_safetensors(path(), {{"f", tensor("F32", {2}, f)}}, error)) << error;
    const auto opened = SafetensorsFile::open(path(), error);
    ASSERT_TRUE(opened) << error;
    EXPECT_EQ(opened->find("g"), nullptr);
    EXPECT_FALSE(opened->require("g", "F32", {2}, error));
    EXPECT_THAT(error, HasSubstr("tensor 'g' is missing (the file has 1 tensors: f)"));
    EXPECT_FALSE(opened->require("f", "F16", {2}, error));
    EXPECT_THAT(error, HasSubstr("tensor 'f' is F32 [2]: expected F16 [2]"));
    EXPECT_FALSE(opened->require("f", "F32", {2, 1}, error));
    EXPECT_THAT(error, HasSubstr("tensor 'f' is F32 [2]: expected F32 [2, 1]"));
}

TEST_F(Safetensors, WhatIsNoFileIsSaidToBe) {
    std::string error;
    EXPECT_FALSE(SafetensorsFile::open(path("missing"), error));
    EXPECT_THAT(error, HasSubstr("cannot be opened: No such file"));
    EXPECT_FALSE(SafetensorsFile::open(directory_.string(), error));
    EXPECT_THAT(error, HasSubstr("is not a regular file"));
    EXPECT_THAT(error_of(""), HasSubstr("is truncated: it has 0 bytes, expected at least 8"));
    EXPECT_THAT(error_of("1234567"), HasSubstr("is truncated: it has 7 bytes"));
}

struct Malformed {
    const char *name, *header;
    size_t data_bytes;
    const char *message;
};

// A header around one tensor.
#define A(dtype, shape, offsets) "{\"a\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

const Malformed kMalformed[] = {
    {"empty_header", "", 0, "not valid JSON"},
    {"no_json", "hello", 0, "not valid JSON"},
    {"half_json", R"({"a":)", 0, "not valid JSON"},
    {"json_and_more", "{}x", 0, "not valid JSON"},
    {"bad_utf8", "{\"\xff\":1}", 0, "not valid JSON"},
    {"list", "[]", 0, "its header is []: expected a JSON object"},
    {"number", "7", 0, "its header is 7: expected a JSON object"},
    {"deep", R"({"a":[[[[[[[[]]]]]]]]})", 0, "nests deeper"},
    {"twice",
     R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
     "the key \"a\" occurs twice"},
    {"entry_is_number", R"({"a":1})", 0, "tensor 'a': its entry is 1: expected an object"},
    {"no_dtype", R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, "tensor 'a': its entry lacks 'dtype'"},
    {"no_shape", R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, "its entry lacks 'shape'"},
    {"no_offsets", R"({"a":{"dtype":"U8","shape":[1]}})", 1, "its entry lacks 'data_offsets'"},
    {"dtype_unknown", A("\"F33\"", "[1]", "[0,4]"), 4, "dtype is \"F33\": expected one of F64, F32"},
    {"dtype_is_number", A("32", "[1]", "[0,4]"), 4, "dtype is 32: expected a string"},
    {"shape_is_number", A("\"F32\"", "1", "[0,4]"), 4, "shape is 1: expected a list"},
    {"shape_negative", A("\"F32\"", "[-1]", "[0,4]"), 4, "has the extent -1: expected a non-negative integer"},
    {"shape_fraction", A("\"F32\"", "[1.5]", "[0,4]"), 4, "has the extent 1.5"},
    {"shape_text", A("\"F32\"", "[\"1\"]", "[0,4]"), 4, "has the extent \"1\""},
    {"shape_beyond_int64", A("\"F32\"", "[18446744073709551615]", "[0,4]"), 4, "has the extent 18446744073709551615"},
    {"shape_overflows", A("\"F32\"", "[4294967296,4294967296]", "[0,4]"), 4, "its size overflows"},
    {"shape_wraps_to_0", A("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0, "its size overflows"},
    {"offsets_number", A("\"U8\"", "[1]", "1"), 1, "data_offsets is 1: expected two non-negative integers"},
    {"offsets_one", A("\"U8\"", "[1]", "[1]"), 1, "data_offsets is [1]: expected two"},
    {"offsets_three", A("\"U8\"", "[1]", "[0,1,2]"), 2, "data_offsets is [0,1,2]: expected two"},
    {"offsets_negative", A("\"U8\"", "[1]", "[-1,0]"), 1, "data_offsets is [-1,0]: expected two non-negative"},
    {"offsets_fraction", A("\"U8\"", "[1]", "[0,1.0]"), 1, "data_offsets is [0,1.0]"},
    {"offsets_swapped", A("\"U8\"", "[1]", "[1,0]"), 1, "data_offsets is [1, 0]: expected begin <= end"},
    {"offsets_beyond", A("\"U8\"", "[8]", "[0,8]"), 7,
     "data_offsets [0, 8] is out of range: the file has 7 bytes of data"},
    {"offsets_far_beyond", A("\"U8\"", "[1]", "[9223372036854775806,9223372036854775807]"), 1, "is out of range"},
    {"too_few_bytes", A("\"F32\"", "[2]", "[0,4]"), 4, "data_offsets [0, 4] hold 4 bytes, but F32 [2] needs 8"},
    {"too_many_bytes", A("\"F32\"", "[2]", "[0,12]"), 12, "hold 12 bytes, but F32 [2] needs 8"},
    {"overlap",
     R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})", 7,
     "tensors 'a' and 'b' overlap: 'b' begins at 3"},
    {"same_place",
     R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4,
     "overlap"},
    {"gap",
     R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})", 3,
     "bytes [1, 2) of the data before tensor 'b' belong to no tensor"},
    {"more_data", A("\"U8\"", "[1]", "[0,1]"), 2, "bytes [1, 2) at the end of the data belong to no tensor"},
    {"only_data", "{}", 3, "bytes [0, 3) at the end"},
    {"metadata_number", R"({"__metadata__":1})", 0, "__metadata__ is 1: expected an object"},
    {"metadata_value", R"({"__metadata__":{"k":1}})", 0, "__metadata__.k is 1: expected a string"},
};

#undef A

TEST_F(Safetensors, EveryMalformedHeaderHasItsMessage) {
    for (const Malformed &m : kMalformed) {
        SCOPED_TRACE(m.name);
        EXPECT_THAT(error_of(file(m.header, m.data_bytes)), HasSubstr(m.message));
    }
}

TEST_F(Safetensors, HeaderLengthsAreChecked) {
    std::string bytes = file("{}", 0);
    auto with_length = [&](uint64_t length) {
        std::memcpy(bytes.data(), &length, 8);
        return bytes;
    };
    EXPECT_THAT(error_of(with_length(3)), HasSubstr("is truncated: header length 3, but only 2 bytes follow"));
    EXPECT_THAT(error_of(with_length(100'000'001)),
                HasSubstr("header length is 100000001: expected at most 100000000"));
    EXPECT_THAT(error_of(with_length(~uint64_t(0))), HasSubstr("header length is 18446744073709551615"));
    EXPECT_EQ(error_of(with_length(2)), "");
}

std::string good_file() {
    std::string header =
        R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"I64","shape":[1],"data_offsets":[8,16]}})";
    std::string bytes(8, '\0');
    const uint64_t size = header.size();
    std::memcpy(bytes.data(), &size, 8);
    return bytes + header + std::string(16, 'x');
}

TEST_F(Safetensors, EveryTruncationIsAnError) {
    const std::string whole = good_file();
    ASSERT_EQ(error_of(whole), "");
    for (size_t size = 0; size < whole.size(); size++) EXPECT_NE(error_of(whole.substr(0, size)), "") << size;
}

TEST_F(Safetensors, AnyChangedByteIsAnErrorOrStaysInsideTheFile) {
    const std::string whole = good_file();
    int errors = 0;
    for (size_t at = 0; at < whole.size() - 16; at++)
        for (const char byte : {'"', '9', '-', '}', '\xff'}) {
            std::string changed = whole;
            changed[at] = byte;
            write(changed);
            std::string error;
            const auto opened = SafetensorsFile::open(path(), error);
            if (!opened) {
                errors++;
                EXPECT_FALSE(error.empty());
                continue;
            }
            size_t sum = 0;
            for (const auto &[name, t] : opened->tensors())
                for (size_t i = 0; i < t.bytes; i++)
                    sum += size_t(t.data[i]); // under a sanitizer, or at a page's end, a crash
            EXPECT_LE(sum, 16 * size_t('x'));
        }
    EXPECT_GT(errors, 500);
}

} // namespace
