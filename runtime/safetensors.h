// Reading and writing .safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes.
// The reader maps the file and checks everything the header claims before it hands out a pointer, so that a truncated
// or forged file is an error message and never a read outside the mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace attune::rt {

struct SafetensorsFile {
    // One tensor of the file, dense and row-major. `data` lives as long as the file object and is aligned for its
    // dtype.
    struct Tensor {
        std::string dtype; // as in the file: "F32", "I64", ...
        std::vector<int64_t> shape;
        const std::byte *data = nullptr;
        size_t bytes = 0;
    };

    // On failure the result is empty and `error` names the file, what was found and what was expected.
    static std::optional<SafetensorsFile> open(const std::string &path, std::string &error);

    // nullptr if there is no tensor of that name.
    const Tensor *find(const std::string &name) const;

    // As find, but also checks the dtype and the shape; on any mismatch nullptr and a message in `error`.
    const Tensor *require(const std::string &name, const std::string &dtype, const std::vector<int64_t> &shape,
                          std::string &error) const;

    const std::string &path() const { return path_; }
    const std::map<std::string, Tensor> &tensors() const { return tensors_; }
    const std::map<std::string, std::string> &metadata() const { return metadata_; }

  private:
    std::string path_;
    std::shared_ptr<const std::byte> mapping_;
    std::vector<std::unique_ptr<std::byte[]>> copies_; // of tensors that the file keeps at an odd address
    std::map<std::string, Tensor> tensors_;
    std::map<std::string, std::string> metadata_;
};

// Bytes of an element of a safetensors dtype ("F32" -> 4), or 0 if the dtype is unknown.
size_t safetensors_dtype_size(const std::string &dtype);

// "[2, 3]"
std::string shape_string(const std::vector<int64_t> &shape);

// Writes the tensors (their `bytes` must fit dtype and shape) to a temporary file beside `path` and renames it, so that
// `path` is either the whole file or what it was before. False and a message in `error` on failure.
bool write_safetensors(const std::string &path, const std::map<std::string, SafetensorsFile::Tensor> &tensors,
                       std::string &error);

} // namespace attune::rt
