#include "staging.h"

#include "device.h"
#include "status.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

namespace attune::rt::device {

namespace {

size_t width(attune_dtype t) {
    return t == ATTUNE_F32 || t == ATTUNE_I32 ? 4 : t == ATTUNE_U8 ? 1 : t == ATTUNE_I64 ? 8 : 2;
}

struct Piece {
    void *address, *context;
    size_t bytes;
    int users;
    bool zeros;
};
struct Pool {
    std::mutex mutex;
    std::vector<Piece> pieces;
};
Pool &pool(attune_device device) {
    static Pool pools[4];
    return pools[device];
}

Piece *find_zeros(Pool &p, void *context) {
    for (Piece &piece : p.pieces)
        if (piece.zeros && piece.context == context) return &piece;
    return nullptr;
}

// Elements that an array of these extents and strides walks over, broadcast dimensions counted once.
int64_t elements_of(const attune_tensor &t) {
    int64_t n = 1;
    for (int i = 0; i < 4; i++)
        if (t.shape[i] > 1 && t.stride[i]) n *= t.shape[i];
    return n;
}

// Dense rows in the order of the dimensions; broadcast ones keep their stride of 0.
void make_dense(attune_tensor &t) {
    int64_t stride = 1;
    for (int i = 3; i >= 0; i--) {
        if (t.shape[i] > 1 && t.stride[i] == 0) continue;
        t.stride[i] = stride;
        stride *= t.shape[i];
    }
}

// Calls f(theirs, ours, count, stride of theirs) for the elements of each row: offsets in elements.
template <typename F> void each_row(const attune_tensor &theirs, const attune_tensor &ours, F f) {
    const auto extent = [&](int i) {
        return theirs.stride[i] ? theirs.shape[i] : std::min<int64_t>(theirs.shape[i], 1);
    };
    for (int64_t b = 0; b < extent(0); b++)
        for (int64_t h = 0; h < extent(1); h++)
            for (int64_t i = 0; i < extent(2); i++)
                f(b * theirs.stride[0] + h * theirs.stride[1] + i * theirs.stride[2],
                  b * ours.stride[0] + h * ours.stride[1] + i * ours.stride[2], extent(3), theirs.stride[3]);
}

void copy_row(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t n, size_t bytes) {
    if ((to_stride == 1 && from_stride == 1) || n == 1) {
        std::memcpy(to, from, size_t(n) * bytes);
        return;
    }
    for (int64_t d = 0; d < n; d++)
        std::memcpy(to + d * to_stride * int64_t(bytes), from + d * from_stride * int64_t(bytes), bytes);
}

bool same_layout(const attune_tensor &a, const attune_tensor &b) {
    for (int i = 0; i < 4; i++)
        if (a.shape[i] > 1 && a.stride[i] != b.stride[i]) return false;
    return true;
}

} // namespace

Staging::~Staging() {
    Pool &p = pool(device_);
    std::lock_guard lock(p.mutex);
    for (void *address : taken_)
        for (Piece &piece : p.pieces)
            if (piece.address == address) piece.users--;
}

attune_status Staging::take(size_t n, void **address) {
    Pool &p = pool(device_);
    void *context = backend(device_).context();
    const auto find = [&] {
        Piece *best = nullptr;
        for (Piece &piece : p.pieces)
            if (!piece.users && !piece.zeros && piece.context == context && piece.bytes >= n &&
                piece.bytes <= 4 * n + 65536 && (!best || piece.bytes < best->bytes))
                best = &piece;
        return best;
    };
    copied_ = true;
    std::lock_guard lock(p.mutex);
    if (Piece *piece = find()) {
        piece->users = 1;
        *address = piece->address;
    } else {
        attune_status s = allocate(device_, n, address);
        if (s == ATTUNE_OUT_OF_MEMORY) { // what other shapes have left behind goes first
            std::erase_if(p.pieces, [&](const Piece &piece) {
                return !piece.users && piece.context == context && release(device_, piece.address) == ATTUNE_OK;
            });
            s = allocate(device_, n, address);
        }
        if (s) return s;
        p.pieces.push_back({*address, context, n, 1, false});
    }
    taken_.push_back(*address);
    return ATTUNE_OK;
}

attune_status Staging::zeros() {
    Pool &p = pool(device_);
    void *context = backend(device_).context();
    std::lock_guard lock(p.mutex);
    Piece *piece = find_zeros(p, context);
    if (!piece) {
        void *address = nullptr;
        constexpr char kZeros[kAlign] = {};
        Place place;
        if (attune_status s = allocate(device_, kAlign, &address)) return s;
        locate(device_, address, place);
        if (attune_status s = backend(device_).copy_in(place.handle, place.offset, kZeros, kAlign)) {
            release(device_, address);
            return s;
        }
        p.pieces.push_back({address, context, size_t(kAlign), 0, true});
        piece = &p.pieces.back();
    }
    piece->users++;
    taken_.push_back(piece->address);
    return ATTUNE_OK;
}

void *zeros_of(attune_device device) {
    Pool &p = pool(device);
    std::lock_guard lock(p.mutex);
    const Piece *piece = find_zeros(p, backend(device).context());
    return piece ? piece->address : nullptr;
}

attune_status Staging::bytes(const void *from, size_t n, void **address) {
    if (attune_status s = take(n, address)) return s;
    Place place;
    locate(device_, *address, place);
    return backend(device_).copy_in(place.handle, place.offset, from, n);
}

attune_status Staging::input(attune_tensor &t) {
    if (t.device != ATTUNE_CPU) return ATTUNE_OK;
    attune_tensor ours = t;
    ours.device = device_;
    make_dense(ours);
    const size_t w = width(t.dtype), n = size_t(elements_of(t)) * w;
    bool empty = false;
    for (int64_t extent : t.shape) empty = empty || extent == 0;
    if (empty) {
        if (attune_status s = take(256, &ours.data)) return s;
    } else if (same_layout(t, ours)) {
        if (attune_status s = bytes(t.data, n, &ours.data)) return s;
    } else {
        const auto dense = std::make_unique_for_overwrite<char[]>(n);
        const auto *from = static_cast<const char *>(t.data);
        each_row(t, ours, [&](int64_t theirs, int64_t mine, int64_t count, int64_t stride) {
            copy_row(dense.get() + mine * int64_t(w), 1, from + theirs * int64_t(w), stride, count, w);
        });
        if (attune_status s = bytes(dense.get(), n, &ours.data)) return s;
    }
    t = ours;
    return ATTUNE_OK;
}

attune_status Staging::input(attune_param &p) {
    if (!p.rank) return ATTUNE_OK;
    attune_tensor t{const_cast<void *>(p.data), p.dtype, ATTUNE_CPU, {1, 1, 1, 1}, {}};
    for (int d = 0; d < p.rank; d++) { // the last dimensions of a tensor
        t.shape[4 - p.rank + d] = p.shape[d];
        t.stride[4 - p.rank + d] = p.shape[d] > 1 ? p.stride[d] : 1;
    }
    if (attune_status s = input(t)) return s;
    p.data = t.data;
    for (int d = 0; d < p.rank; d++) p.stride[d] = t.stride[4 - p.rank + d];
    return ATTUNE_OK;
}

attune_status Staging::output(attune_tensor &t) {
    return t.device == ATTUNE_CPU ? detour(t) : ATTUNE_OK;
}

attune_status Staging::detour(attune_tensor &t) {
    attune_tensor ours = t;
    ours.device = device_;
    make_dense(ours);
    const auto w = int64_t(width(t.dtype));
    if (aligned_batches_) ours.stride[0] = (ours.stride[0] * w + kAlign - 1) / kAlign * kAlign / w;
    if (attune_status s = take(size_t(ours.stride[0] * ours.shape[0] * w), &ours.data)) return s;
    outputs_.push_back({t, ours});
    t = ours;
    return ATTUNE_OK;
}

attune_status Staging::finish() {
    Backend &b = backend(device_);
    if (used())
        if (attune_status s = b.synchronize()) return s;
    for (const auto &[theirs, ours] : outputs_) {
        const size_t w = width(ours.dtype), n = size_t(ours.stride[0] * ours.shape[0]) * w;
        Place from;
        locate(device_, ours.data, from);
        if (theirs.device == ATTUNE_CPU && same_layout(theirs, ours)) {
            if (attune_status s = b.copy_out(theirs.data, from.handle, from.offset, n)) return s;
            continue;
        }
        const auto dense = std::make_unique_for_overwrite<char[]>(n);
        if (attune_status s = b.copy_out(dense.get(), from.handle, from.offset, n)) return s;
        attune_status status = ATTUNE_OK;
        each_row(theirs, ours, [&](int64_t to, int64_t mine, int64_t count, int64_t stride) {
            const char *row = dense.get() + mine * int64_t(w);
            char *target = static_cast<char *>(theirs.data) + to * int64_t(w);
            if (theirs.device == ATTUNE_CPU) return copy_row(target, stride, row, 1, count, w);
            // Element by element where they are apart: what lies between them is not ours.
            const int64_t step = stride == 1 ? count : 1;
            for (int64_t d = 0; d < count && !status; d += step) {
                Place place;
                if (locate(device_, target + d * stride * int64_t(w), place))
                    status = b.copy_in(place.handle, place.offset, row + d * int64_t(w), size_t(step) * w);
            }
        });
        if (status) return status;
    }
    return ATTUNE_OK;
}

attune_status trim(attune_device device) {
    backend(device).forget_code();
    Pool &p = pool(device);
    std::lock_guard lock(p.mutex);
    attune_status status = ATTUNE_OK;
    std::erase_if(p.pieces, [&](const Piece &piece) {
        if (piece.users) return false;
        if (attune_status s = release(device, piece.address)) status = s;
        return true;
    });
    return status;
}

} // namespace attune::rt::device

extern "C" attune_status attune_device_trim(attune_device device) {
    using namespace attune::rt;
    if (device < ATTUNE_OPENCL || device > ATTUNE_CUDA)
        return fail(ATTUNE_INVALID_ARGUMENT, "device is {}: expected ATTUNE_OPENCL, ATTUNE_VULKAN or ATTUNE_CUDA",
                    int(device));
    if (const std::string &why = device::backend(device).why_not; !why.empty())
        return fail(ATTUNE_DEVICE_ERROR, "{}", why);
    return device::trim(device);
}
