// GoogleTest's main, with a handler that says which kernel on which case touched memory outside its arrays.
#include "bed.h"

int main(int argc, char **argv) {
    ::testing::InitGoogleTest(&argc, argv);
    attune::tools::install_fault_handler();
    return RUN_ALL_TESTS();
}
