// Vector registers, and products of small matrices that keep their sums in registers. For the compilers of GCC's vector
// extensions (https://gcc.gnu.org/onlinedocs/gcc/Vector-Extensions.html).
//
// BFLOAT16 is 1 if activations and the KV cache are bfloat16, and 0 if they are float32. Sums are float32. Products are
// of bfloat16 where the processor multiplies it (AVX512-BF16), else of float32.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if BFLOAT16 && defined(__AVX512BF16__)
#include <immintrin.h>
#define BFLOAT16_PRODUCTS
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, VECTORS = 4;  // of a register of floats; registers in a row of sums: 6 * 4 of 32 hold sums
#else
constexpr int LANES = 8, VECTORS = 2;  // 6 * 2 of 16
#endif
constexpr int ROWS = 6;  // of sums that are in registers together

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#ifdef __AVX512F__
constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

#if BFLOAT16
using Stored = uint16_t;  // as in the cache, q and the output

[[maybe_unused]] float widen(Stored x) {
    const uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

[[maybe_unused]] Stored narrow(float x) {  // to the nearest, ties to even
    if (x != x) return 0x7fc0;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
using Stored = float;
[[maybe_unused]] float widen(Stored x) { return x; }
[[maybe_unused]] Stored narrow(float x) { return x; }
#endif

// A word is what one lane of a vector multiplies at once: a float, or a pair of bfloat16 that are adjacent in the
// dimension that is summed.
#ifdef BFLOAT16_PRODUCTS
constexpr int PER_WORD = 2;
using Element = uint16_t;
using Word = int32_t;
using Words = Ints;
[[maybe_unused]] Element element(Stored x) { return x; }
Floats multiply_add(Floats sum, Word a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
[[maybe_unused]] void store(Element* to, Floats x) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &narrow, sizeof narrow);
}
#else
constexpr int PER_WORD = 1;
using Element = float;
using Word = float;
using Words = Floats;
[[maybe_unused]] Element element(Stored x) { return widen(x); }
Floats multiply_add(Floats sum, Word a, Words b) { return sum + a * b; }
[[maybe_unused]] void store(Element* to, Floats x) { *(Floats*)to = x; }
#endif

// Write a register of what is computed.
[[maybe_unused]] void narrow(Stored* to, Floats x) {
#ifdef BFLOAT16_PRODUCTS
    store(to, x);
#elif BFLOAT16
    const Unsigned bits = (Unsigned)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *(Halves*)to = __builtin_convertvector(x == x ? rounded : Unsigned{} + 0x7fc0, Halves);
#else
    *(Floats*)to = x;
#endif
}

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// c [N, COLUMNS] = or += a [N, depth] words times b [depth, COLUMNS] words. Rows of `a` are `stride` words apart.
template <int N, int COLUMNS, bool ADD>
void multiply_rows(const Element* a, int stride, int depth, const Element* b, float* c) {
    constexpr int WIDTH = COLUMNS / LANES, TOGETHER = WIDTH % VECTORS == 0 ? VECTORS : WIDTH % 2 == 0 ? 2 : 1;
    const auto a_words = (const Word __attribute__((may_alias))*)a;
    const auto b_words = (const Words*)b;
    const auto c_vectors = (Floats*)c;
    for (int column = 0; column < WIDTH; column += TOGETHER) {
        Floats sums[N][TOGETHER];
        for (int i = 0; i < N; i++)
            for (int j = 0; j < TOGETHER; j++) sums[i][j] = ADD ? c_vectors[i * WIDTH + column + j] : Floats{};
        for (int k = 0; k < depth; k++)
            for (int i = 0; i < N; i++)
                for (int j = 0; j < TOGETHER; j++)
                    sums[i][j] = multiply_add(sums[i][j], a_words[i * stride + k], b_words[k * WIDTH + column + j]);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < TOGETHER; j++) c_vectors[i * WIDTH + column + j] = sums[i][j];
    }
}

// The same for any number of rows, N at a time.
template <int COLUMNS, bool ADD, int N = ROWS>
void multiply(const Element* a, int stride, int depth, const Element* b, float* c, int rows) {
    for (; rows >= N; rows -= N, a += N * stride * PER_WORD, c += N * COLUMNS)
        multiply_rows<N, COLUMNS, ADD>(a, stride, depth, b, c);
    if constexpr (N > 1) multiply<COLUMNS, ADD, N - 1>(a, stride, depth, b, c, rows);
}

}  // namespace
