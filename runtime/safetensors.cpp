// The .safetensors reader and writer; see safetensors.h. The format: https://github.com/huggingface/safetensors
#include "safetensors.h"

#include "format.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tuple>
#include <unistd.h>
#include <utility>

namespace attune::rt {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

namespace {

constexpr uint64_t kMaxHeader = 100'000'000; // the format's own limit

constexpr std::array<std::pair<const char *, size_t>, 17> kDtypes{{{"F64", 8},
                                                                   {"F32", 4},
                                                                   {"F16", 2},
                                                                   {"BF16", 2},
                                                                   {"F8_E4M3", 1},
                                                                   {"F8_E5M2", 1},
                                                                   {"F8_E8M0", 1},
                                                                   {"C64", 8},
                                                                   {"I64", 8},
                                                                   {"I32", 4},
                                                                   {"I16", 2},
                                                                   {"I8", 1},
                                                                   {"U64", 8},
                                                                   {"U32", 4},
                                                                   {"U16", 2},
                                                                   {"U8", 1},
                                                                   {"BOOL", 1}}};

std::string known_dtypes() {
    std::string names;
    for (const auto &[name, size] : kDtypes) names += (names.empty() ? "" : ", ") + std::string(name);
    return names;
}

struct FileDescriptor {
    int fd = -1;
    ~FileDescriptor() {
        if (fd >= 0) ::close(fd);
    }
};

// Bytes of a dense tensor, or nullopt if that does not fit int64.
std::optional<uint64_t> dense_bytes(const std::vector<int64_t> &shape, size_t element) {
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
    uint64_t bytes = element;
    for (int64_t extent : shape) {
        if (bytes > uint64_t(std::numeric_limits<int64_t>::max()) / uint64_t(extent)) return std::nullopt;
        bytes *= uint64_t(extent);
    }
    return bytes;
}

// A JSON value for a message: short, whatever it is, and always valid UTF-8.
std::string shown(const nlohmann::json &value) {
    std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

// The JSON library keeps the last of two equal keys; in a file format that is a way to smuggle, so it is an error here.
// A header nests three deep at most: deeper is refused while parsing, before recursion could exhaust the stack.
struct HeaderCallback {
    std::vector<std::set<std::string>> keys;
    std::string *problem;
    bool operator()(int depth, nlohmann::json::parse_event_t event, nlohmann::json &value) {
        using Event = nlohmann::json::parse_event_t;
        if (event == Event::object_start || event == Event::array_start) {
            if (depth > 3 && problem->empty()) *problem = "it nests deeper than the format allows";
            keys.emplace_back();
        } else if (event == Event::object_end || event == Event::array_end) {
            keys.pop_back();
        } else if (event == Event::key && !keys.back().insert(value.get_ref<const std::string &>()).second) {
            if (problem->empty()) *problem = formatted("the key {} occurs twice", shown(value));
        }
        return problem->empty();
    }
};

// Non-negative integer, or nullopt.
std::optional<uint64_t> natural(const nlohmann::json &value) {
    if (!value.is_number_integer() || (!value.is_number_unsigned() && value.get<int64_t>() < 0)) return std::nullopt;
    uint64_t number = value.get<uint64_t>();
    if (number > uint64_t(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return number;
}

} // namespace

size_t safetensors_dtype_size(const std::string &dtype) {
    for (const auto &[name, size] : kDtypes)
        if (dtype == name) return size;
    return 0;
}

std::string shape_string(const std::vector<int64_t> &shape) {
    return list(shape);
}

std::optional<SafetensorsFile> SafetensorsFile::open(const std::string &path, std::string &error) {
    auto fail = [&](const std::string &what) {
        error = formatted("safetensors file '{}': {}", path, what);
        return std::nullopt;
    };

    FileDescriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
    if (file.fd < 0) return fail(formatted("cannot be opened: {}", std::strerror(errno)));
    struct stat status {};
    if (::fstat(file.fd, &status) != 0) return fail(formatted("cannot be examined: {}", std::strerror(errno)));
    if (!S_ISREG(status.st_mode)) return fail("is not a regular file");
    const uint64_t size = uint64_t(status.st_size);
    if (size < 8)
        return fail(formatted("is truncated: it has {} bytes, expected at least 8 for the header length", size));

    void *address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
    if (address == MAP_FAILED) return fail(formatted("cannot be mapped: {}", std::strerror(errno)));
    SafetensorsFile result;
    result.path_ = path;
    result.mapping_ =
        std::shared_ptr<const std::byte>(static_cast<const std::byte *>(address),
                                         [size](const std::byte *p) { ::munmap(const_cast<std::byte *>(p), size); });

    uint64_t header_size;
    std::memcpy(&header_size, address, 8);
    if (header_size > kMaxHeader)
        return fail(formatted("header length is {}: expected at most {}", header_size, kMaxHeader));
    if (header_size > size - 8)
        return fail(formatted("is truncated: header length {}, but only {} bytes follow", header_size, size - 8));

    const char *text = static_cast<const char *>(address) + 8;
    const std::byte *base = result.mapping_.get() + 8 + header_size;
    const uint64_t data_size = size - 8 - header_size;

    nlohmann::json header;
    std::string problem;
    try {
        header = nlohmann::json::parse(text, text + header_size, HeaderCallback{{}, &problem});
    } catch (const nlohmann::json::exception &e) {
        return fail(formatted("its header is not valid JSON: {}", e.what()));
    }
    if (!problem.empty()) return fail(formatted("its header is not valid: {}", problem));
    if (!header.is_object()) return fail(formatted("its header is {}: expected a JSON object", shown(header)));

    struct Range {
        uint64_t begin, end;
        std::string name;
    };
    std::vector<Range> ranges;
    for (const auto &[name, entry] : header.items()) {
        if (name == "__metadata__") {
            if (!entry.is_object()) return fail(formatted("__metadata__ is {}: expected an object", shown(entry)));
            for (const auto &[key, value] : entry.items()) {
                if (!value.is_string())
                    return fail(formatted("__metadata__.{} is {}: expected a string", key, shown(value)));
                result.metadata_[key] = value.get<std::string>();
            }
            continue;
        }
        auto tensor_fail = [&, name = name](const std::string &what) {
            return fail(formatted("tensor '{}': {}", name, what));
        };
        if (!entry.is_object()) return tensor_fail(formatted("its entry is {}: expected an object", shown(entry)));
        for (const char *key : {"dtype", "shape", "data_offsets"})
            if (!entry.contains(key)) return tensor_fail(formatted("its entry lacks '{}'", key));

        Tensor tensor;
        if (!entry["dtype"].is_string())
            return tensor_fail(formatted("dtype is {}: expected a string", shown(entry["dtype"])));
        tensor.dtype = entry["dtype"].get<std::string>();
        const size_t element = safetensors_dtype_size(tensor.dtype);
        if (element == 0)
            return tensor_fail(formatted("dtype is {}: expected one of {}", shown(entry["dtype"]), known_dtypes()));

        const auto &shape = entry["shape"];
        if (!shape.is_array()) return tensor_fail(formatted("shape is {}: expected a list", shown(shape)));
        for (const auto &extent : shape) {
            auto number = natural(extent);
            if (!number)
                return tensor_fail(formatted("shape {} has the extent {}: expected a non-negative integer",
                                             shown(shape), shown(extent)));
            tensor.shape.push_back(int64_t(*number));
        }
        const auto expected = dense_bytes(tensor.shape, element);
        if (!expected) return tensor_fail(formatted("shape {}: its size overflows 64 bits", shown(shape)));

        const auto &offsets = entry["data_offsets"];
        if (!offsets.is_array() || offsets.size() != 2 || !natural(offsets[0]) || !natural(offsets[1]))
            return tensor_fail(
                formatted("data_offsets is {}: expected two non-negative integers [begin, end]", shown(offsets)));
        const uint64_t begin = *natural(offsets[0]), end = *natural(offsets[1]);
        if (begin > end) return tensor_fail(formatted("data_offsets is [{}, {}]: expected begin <= end", begin, end));
        if (end > data_size)
            return tensor_fail(formatted("data_offsets [{}, {}] is out of range: the file has {} bytes of data "
                                         "(it may be truncated)",
                                         begin, end, data_size));
        if (end - begin != *expected)
            return tensor_fail(formatted("data_offsets [{}, {}] hold {} bytes, but {} {} needs {}", begin, end,
                                         end - begin, tensor.dtype, shape_string(tensor.shape), *expected));
        tensor.bytes = size_t(end - begin);
        tensor.data = base + begin;
        result.tensors_[name] = std::move(tensor);
        ranges.push_back({begin, end, name});
    }

    // The format wants every byte of the data to belong to exactly one tensor.
    std::sort(ranges.begin(), ranges.end(), [](const Range &a, const Range &b) {
        return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    uint64_t covered = 0;
    const std::string *last = nullptr;
    for (const Range &range : ranges) {
        if (range.begin < covered)
            return fail(formatted("tensors '{}' and '{}' overlap: '{}' begins at {}: expected {} or later", *last,
                                  range.name, range.name, range.begin, covered));
        if (range.begin > covered)
            return fail(formatted("bytes [{}, {}) of the data before tensor '{}' belong to no tensor", covered,
                                  range.begin, range.name));
        covered = range.end;
        last = &range.name;
    }
    if (covered != data_size)
        return fail(formatted("bytes [{}, {}) at the end of the data belong to no tensor", covered, data_size));

    for (auto &[name, tensor] : result.tensors_) {
        if (reinterpret_cast<uintptr_t>(tensor.data) % safetensors_dtype_size(tensor.dtype) == 0) continue;
        auto copy = std::make_unique<std::byte[]>(tensor.bytes);
        std::memcpy(copy.get(), tensor.data, tensor.bytes);
        tensor.data = copy.get();
        result.copies_.push_back(std::move(copy));
    }
    return result;
}

const SafetensorsFile::Tensor *SafetensorsFile::find(const std::string &name) const {
    auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
}

const SafetensorsFile::Tensor *SafetensorsFile::require(const std::string &name, const std::string &dtype,
                                                        const std::vector<int64_t> &shape, std::string &error) const {
    const Tensor *tensor = find(name);
    if (!tensor) {
        std::string names;
        size_t listed = 0;
        for (const auto &[other, unused] : tensors_) {
            if (listed++ == 5) break;
            names += (names.empty() ? "" : ", ") + other;
        }
        if (tensors_.size() > 5) names += ", ...";
        error = formatted("safetensors file '{}': tensor '{}' is missing (the file has {} tensors: {})", path_, name,
                          tensors_.size(), names);
        return nullptr;
    }
    if (tensor->dtype != dtype || tensor->shape != shape) {
        error = formatted("safetensors file '{}': tensor '{}' is {} {}: expected {} {}", path_, name, tensor->dtype,
                          shape_string(tensor->shape), dtype, shape_string(shape));
        return nullptr;
    }
    return tensor;
}

bool write_safetensors(const std::string &path, const std::map<std::string, SafetensorsFile::Tensor> &tensors,
                       std::string &error) {
    auto fail = [&](const std::string &what) {
        error = formatted("safetensors file '{}': {}", path, what);
        return false;
    };
    // Wide elements first: with a header of a multiple of 8 bytes every tensor is then aligned in the file.
    std::vector<const std::pair<const std::string, SafetensorsFile::Tensor> *> order;
    for (const auto &entry : tensors) {
        const auto &[name, tensor] = entry;
        const size_t element = safetensors_dtype_size(tensor.dtype);
        if (element == 0)
            return fail(
                formatted("tensor '{}': dtype is '{}': expected one of {}", name, tensor.dtype, known_dtypes()));
        if (std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t extent) { return extent < 0; }))
            return fail(
                formatted("tensor '{}': shape is {}: expected non-negative extents", name, shape_string(tensor.shape)));
        const auto expected = dense_bytes(tensor.shape, element);
        if (!expected || *expected != tensor.bytes)
            return fail(formatted("tensor '{}': bytes is {}, but {} {} needs {}", name, tensor.bytes, tensor.dtype,
                                  shape_string(tensor.shape), expected ? std::to_string(*expected) : "over 2^63"));
        if (tensor.bytes > 0 && tensor.data == nullptr)
            return fail(formatted("tensor '{}': data is null: expected {} bytes", name, tensor.bytes));
        order.push_back(&entry);
    }
    std::stable_sort(order.begin(), order.end(), [](auto *a, auto *b) {
        return safetensors_dtype_size(a->second.dtype) > safetensors_dtype_size(b->second.dtype);
    });

    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    uint64_t offset = 0;
    for (const auto *entry : order) {
        const auto &[name, tensor] = *entry;
        header[name] = {
            {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes}}};
        offset += tensor.bytes;
    }
    std::string text;
    try {
        text = header.dump();
    } catch (const nlohmann::json::exception &e) {
        return fail(formatted("a tensor name is not valid UTF-8: {}", e.what()));
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');

    // The process id keeps two writers of the same path apart; threads of one process have no business doing that.
    const std::string temporary = formatted("{}.{}.tmp", path, ::getpid());
    FileDescriptor file{::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
    if (file.fd < 0) return fail(formatted("cannot create '{}': {}", temporary, std::strerror(errno)));
    auto put = [&](const void *data, size_t bytes) {
        const char *p = static_cast<const char *>(data);
        while (bytes > 0) {
            const ssize_t n = ::write(file.fd, p, bytes);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) return false;
            p += n;
            bytes -= size_t(n);
        }
        return true;
    };
    const uint64_t header_size = text.size();
    bool written = put(&header_size, 8) && put(text.data(), text.size());
    for (size_t i = 0; written && i < order.size(); i++) written = put(order[i]->second.data, order[i]->second.bytes);
    written = written && ::rename(temporary.c_str(), path.c_str()) == 0;
    if (!written) {
        const std::string reason = std::strerror(errno);
        ::unlink(temporary.c_str());
        return fail(formatted("cannot be written: {}", reason));
    }
    return true;
}

} // namespace attune::rt
