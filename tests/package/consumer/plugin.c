#include <attune/attune.h>

__attribute__((visibility("default"))) void plugin_set_threads(int threads) {
    attune_set_num_threads(threads);
}
__attribute__((visibility("default"))) int plugin_threads(void) {
    return attune_get_num_threads();
}
