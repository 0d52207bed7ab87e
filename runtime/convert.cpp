#include "convert.h"

#include "cpu_features.h"
#include "half.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace attune::rt {

namespace {

// The same loop for each type; with a constant stride of 1 the compiler makes vectors of those of bf16.
template <typename F> void each(int64_t n, int64_t stride, F f) {
    if (stride == 1)
        for (int64_t c = 0; c < n; c++) f(c, c);
    else
        for (int64_t c = 0; c < n; c++) f(c, c * stride);
}

#if defined(__x86_64__)
bool has_avx2() { // which here includes F16C
    static const bool has = isa_rank(dispatch_isa()) >= isa_rank("avx2");
    return has;
}

// In software an f16 takes 10 ns, which is more than its share of a whole attention at n 128. F16C gives the same bits.
__attribute__((target("avx2,f16c"))) int64_t widen_f16(const uint16_t *x, int64_t n, float *y) {
    int64_t c = 0;
    for (; c + 8 <= n; c += 8)
        _mm256_storeu_ps(y + c, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x + c))));
    return c;
}

__attribute__((target("avx2,f16c"))) int64_t narrow_f16(const float *x, int64_t n, uint16_t *y) {
    int64_t c = 0;
    for (; c + 8 <= n; c += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(y + c),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + c), _MM_FROUND_TO_NEAREST_INT));
    return c;
}

__attribute__((target("avx2"))) int64_t widen_bf16(const uint16_t *x, int64_t n, float *y) {
    int64_t c = 0;
    for (; c + 8 <= n; c += 8) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(x + c));
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
        _mm256_storeu_ps(y + c, _mm256_castsi256_ps(bits));
    }
    return c;
}

// As float_to_bf16: nearest even by adding half of the last place, less one if it is even already; NaN apart.
__attribute__((target("avx2"))) inline __m256i round_bf16(const float *x) {
    const __m256 value = _mm256_loadu_ps(x);
    const __m256i u = _mm256_castps_si256(value), top = _mm256_srli_epi32(u, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i even = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(even, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), nan);
}

__attribute__((target("avx2"))) int64_t narrow_bf16(const float *x, int64_t n, uint16_t *y) {
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) {
        const __m256i packed = _mm256_packus_epi32(round_bf16(x + c), round_bf16(x + c + 8)); // by halves of 128 bits
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(y + c), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    return c;
}
#else
bool has_avx2() {
    return false;
}
int64_t widen_f16(const uint16_t *, int64_t, float *) {
    return 0;
}
int64_t narrow_f16(const float *, int64_t, uint16_t *) {
    return 0;
}
int64_t widen_bf16(const uint16_t *, int64_t, float *) {
    return 0;
}
int64_t narrow_bf16(const float *, int64_t, uint16_t *) {
    return 0;
}
#endif

} // namespace

void widen(attune_dtype dtype, const void *x, int64_t stride, int64_t n, float *y) {
    if (dtype == ATTUNE_F32) {
        const float *from = static_cast<const float *>(x);
        if (stride == 1)
            std::memcpy(y, from, size_t(n) * sizeof(float));
        else
            each(n, stride, [&](int64_t c, int64_t at) { y[c] = from[at]; });
        return;
    }
    const uint16_t *from = static_cast<const uint16_t *>(x);
    int64_t done = 0;
    if (stride == 1 && has_avx2()) done = dtype == ATTUNE_BF16 ? widen_bf16(from, n, y) : widen_f16(from, n, y);
    from += done * stride, y += done, n -= done;
    if (dtype == ATTUNE_BF16)
        each(n, stride, [&](int64_t c, int64_t at) { y[c] = bf16_to_float(from[at]); });
    else
        each(n, stride, [&](int64_t c, int64_t at) { y[c] = f16_to_float(from[at]); });
}

void narrow(attune_dtype dtype, const float *x, int64_t n, void *y, int64_t stride) {
    if (dtype == ATTUNE_F32) {
        float *to = static_cast<float *>(y);
        if (stride == 1)
            std::memcpy(to, x, size_t(n) * sizeof(float));
        else
            each(n, stride, [&](int64_t c, int64_t at) { to[at] = x[c]; });
        return;
    }
    uint16_t *to = static_cast<uint16_t *>(y);
    int64_t done = 0;
    if (stride == 1 && has_avx2()) done = dtype == ATTUNE_BF16 ? narrow_bf16(x, n, to) : narrow_f16(x, n, to);
    to += done * stride, x += done, n -= done;
    if (dtype == ATTUNE_BF16)
        each(n, stride, [&](int64_t c, int64_t at) { to[at] = float_to_bf16(x[c]); });
    else
        each(n, stride, [&](int64_t c, int64_t at) { to[at] = float_to_f16(x[c]); });
}

} // namespace attune::rt
