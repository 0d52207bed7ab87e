// The manifest of generated kernels: phases or an Error.
#include "fuzz.h"

#include "lib/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    using namespace attune::tools;
    const attune::fuzz::MemoryFile file(data, size);
    try {
        for (const ManifestPhase &phase : manifest_phases(file.path(), "k"))
            attune::fuzz::require(!phase.command.empty(), "a phase without a command");
    } catch (const Error &) {
    }
    return 0;
}
