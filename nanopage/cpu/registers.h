// Vector registers, and products of small matrices that keep their sums in registers. For the compilers of GCC's vector
// extensions (https://gcc.gnu.org/onlinedocs/gcc/Vector-Extensions.html).
//
// BFLOAT16 is 1 if activations are bfloat16, and 0 if they are float32. Sums are float32. Products multiply bfloat16
// where the processor can (AVX512-BF16), and float32 elsewhere. If activations are float32, weights, K and V may still
// have 16 bits in memory: they are widened as they are read.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if BFLOAT16 && defined(__AVX512BF16__)
#define BFLOAT16_PRODUCTS
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, VECTORS = 4;  // of a register of floats; registers in a row of sums: 6 * 4 of 32 hold sums
#else
constexpr int LANES = 8, VECTORS = 2;  // 6 * 2 of 16
#endif
constexpr int ROWS = 6;  // rows of sums that registers hold at once
constexpr int MOST_SUMS = ROWS * VECTORS;

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#ifdef __AVX512F__
constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

struct Bfloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

[[maybe_unused]] float widen(float x) { return x; }
[[maybe_unused]] float widen(Bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }

[[maybe_unused]] float widen(Float16 x) {
    const uint32_t magnitude = x.bits & 0x7fff, bits = magnitude << 13;
    const float finite = float_of(bits) * 0x1p112f;  // corrects the difference of the exponents' biases
    const float wide = magnitude < 0x7c00 ? finite : float_of(bits | 0x7f800000);
    return x.bits & 0x8000 ? -wide : wide;
}

// Read LANES numbers. GCC uses these instructions only where they are named.
[[maybe_unused]] Floats widen(const float* from) { return *(const Floats*)from; }

[[maybe_unused]] Floats widen(const Bfloat16* from) {
#if defined(__AVX512F__)
    const Ints wide = (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    const Ints wide = (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    const Ints wide = __builtin_convertvector(*(const Halves*)from, Ints);
#endif
    return (Floats)(wide << 16);
}

[[maybe_unused]] Floats widen(const Float16* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Floats wide;
    for (int i = 0; i < LANES; i++) wide[i] = widen(from[i]);
    return wide;
#endif
}

// a * b + c, rounded once where the processor can. With operators, the compiler may round once or twice, depending on the
// code around them. A result could then depend on how many rows are computed at once.
[[maybe_unused]] Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// 2^x. 2^fraction is a polynomial, with a relative error below 3e-7.
[[maybe_unused]] Floats power_of_two(Floats x) {
    const Floats magic = Floats{} + 0x1.8p23f;  // floats of this size are integers: adding it rounds
    const Floats shifted = x + magic, fraction = x - (shifted - magic);
    Floats power = Floats{} + 1.3298820e-3f;
    for (const float coefficient : {9.6183600e-3f, 5.5503286e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        power = fused(power, fraction, Floats{} + coefficient);
    const Ints exponent = ((Ints)shifted + 127) << 23;
    return x < -126.0f ? Floats{} : power * (Floats)exponent;
}

#if BFLOAT16
using Stored = Bfloat16;  // the type of activations in memory

[[maybe_unused]] Stored narrow(float x) {  // to the nearest, ties to even
    if (x != x) return {0x7fc0};
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
#else
using Stored = float;
[[maybe_unused]] Stored narrow(float x) { return x; }
#endif

// A word is what one lane of a vector multiplies at once: a float, or a pair of bfloat16 that are adjacent in the
// dimension that is summed.
#ifdef BFLOAT16_PRODUCTS
constexpr int PER_WORD = 2;
using Element = uint16_t;
using Word = int32_t;
using Words = Ints;
[[maybe_unused]] Element element(Bfloat16 x) { return x.bits; }

// LANES words: the numbers at `from`, and the numbers `stride` behind them.
[[maybe_unused]] Words words_at(const Bfloat16* from, int stride) {
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)from));
    const __m512i high = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(from + stride)));
    return (Words)_mm512_permutex2var_epi16(low, (__m512i)(LANE | (LANE + 32) << 16), high);
}
[[maybe_unused]] Floats multiply_add(Floats sum, Word a, Words b) {
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
template <class Number>
Element element(Number x) {
    return widen(x);
}
template <class Number>
Words words_at(const Number* from, int) {
    return widen(from);
}
[[maybe_unused]] Floats multiply_add(Floats sum, Word a, Words b) {
    return fused(a - Floats{}, b, sum);  // subtracting zeros makes a vector of `a`, and costs nothing
}
#endif

[[maybe_unused]] void store(float* to, Floats x) { *(Floats*)to = x; }

// Write a register of results.
[[maybe_unused]] void narrow(Stored* to, Floats x) {
#ifdef BFLOAT16_PRODUCTS
    store(&to->bits, x);
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
