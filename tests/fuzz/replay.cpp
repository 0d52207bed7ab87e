// Runs a fuzz target over the files of folders: the corpus, in the default tests.
#include "fuzz.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

int main(int argc, char **argv) {
    int count = 0;
    for (int n = 1; n < argc; n++)
        for (const auto &entry : std::filesystem::directory_iterator(argv[n])) {
            std::ifstream file(entry.path(), std::ios::binary);
            const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
            // As it is, and cut off at every length: most parsers go wrong at an end.
            for (size_t size = bytes.size() > 400 ? bytes.size() - 400 : 0; size <= bytes.size(); size++)
                LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t *>(bytes.data()), size);
            count++;
        }
    std::printf("%d files\n", count);
    return count > 0 ? 0 : 1;
}
