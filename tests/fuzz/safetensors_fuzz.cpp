// .safetensors files: every byte of every tensor can be read, or there is a message.
#include "fuzz.h"

#include "safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    using attune::rt::SafetensorsFile;
    const attune::fuzz::MemoryFile memory(data, size);
    std::string error;
    const auto file = SafetensorsFile::open(memory.path(), error);
    attune::fuzz::require(file.has_value() == error.empty(), "neither a file nor a message, or both");
    if (!file) return 0;
    unsigned sum = 0;
    for (const auto &[name, tensor] : file->tensors()) {
        attune::fuzz::require(file->find(name) == &tensor, "a tensor that is not found");
        for (size_t n = 0; n < tensor.bytes; n++) sum += unsigned(tensor.data[n]);
    }
    volatile unsigned keep = sum; // the reads have to happen
    (void)keep;
    return 0;
}
