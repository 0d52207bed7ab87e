// Documents packed one after the other: a row sees the keys of its own. Their numbers never fall.
#include <attune/mods.h>

ATTUNE_MASK_MOD(Buffer<int32_t, 2> document) {
    return document(b, q) == document(b, k);
}

ATTUNE_BLOCK_MOD(Buffer<int32_t, 2> document) {
    const Expr first_row = document(b, q.first), last_row = document(b, q.last);
    const Expr first_key = document(b, k.first), last_key = document(b, k.last);
    return {.none = last_row < first_key || last_key < first_row,
            .all = first_row == last_row && first_key == last_key && first_row == first_key};
}
