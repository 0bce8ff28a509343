// Products with int8 weights: y = x W^T. x becomes int8 as well (W8A8), because processors multiply and add four int8
// at once (VNNI), or two (AVX2).
//
// Each GROUP_INPUTS inputs of a row of x are divided by their largest magnitude and rounded to 127 steps on either side
// of zero. Instructions multiply unsigned by signed integers, so weights are stored as unsigned bytes, 128 more than
// they are, and each sum begins with -128 times the sum of the activations. Integer sums are exact.

#pragma once

#include "registers.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int GROUP_INPUTS = 64;  // inputs; as in tile_linear.py
constexpr int QUAD = 4;           // inputs whose weights are adjacent in memory

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define DOT_PRODUCT _mm512_dpbusd_epi32
using Register = __m512i;
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define DOT_PRODUCT _mm256_dpbusd_avx_epi32
using Register = __m256i;
#endif

// Four activations, as `dot` multiplies them.
struct Quad {
#ifdef DOT_PRODUCT
    using Integer = int8_t;
    static constexpr int ORDER[] = {0, 1, 2, 3};
#else
    using Integer = int16_t;
    static constexpr int ORDER[] = {0, 2, 1, 3};
#endif
    int32_t words[QUAD * sizeof(Integer) / 4];
};

// Registers in a row of sums. They share the registers with the quads of ROWS rows.
#if defined(DOT_PRODUCT) && defined(__AVX512F__)
constexpr int SUMS = 4;
#else
constexpr int SUMS = LANES / 8;
#endif

// For each lane: sum + its four weights, which are bytes, times x.
Ints dot(Ints sum, Ints weights, const Quad& quad) {
#ifdef DOT_PRODUCT
    return (Ints)DOT_PRODUCT((Register)sum, (Register)weights, (Register)(Ints{} + quad.words[0]));
#else
    const Ints even = weights & 0x00ff00ff, odd = (Ints)((Unsigned)weights >> 8) & 0x00ff00ff;
#if defined(__AVX512BW__)
    const auto pairs = [](Ints a, int32_t b) { return (Ints)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(b)); };
#elif defined(__AVX2__)
    const auto pairs = [](Ints a, int32_t b) { return (Ints)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(b)); };
#else
    const auto pairs = [](Ints a, int32_t b) { return (a & 0xffff) * int16_t(b) + (a >> 16) * (b >> 16); };
#endif
    return sum + (pairs(even, quad.words[0]) + pairs(odd, quad.words[1]));
#endif
}

// Rows of x in int8. A quad whose inputs are not all there is filled with zeros.
class Quantized {
   public:
    const int num_quads, num_groups;  // of a row

    Quantized(const Stored* x, int64_t rows, int in_features)
        : num_quads(round_up(in_features, QUAD) / QUAD),
          num_groups(round_up(in_features, GROUP_INPUTS) / GROUP_INPUTS),
          quads(rows * num_quads),
          scales(rows * num_groups),
          starts(rows * num_groups) {
#pragma omp parallel for num_threads(THREADS) if (rows * in_features > 1 << 16)
        for (int64_t row = 0; row < rows; row++)
            for (int group = 0; group < num_groups; group++) {
                const int begin = group * GROUP_INPUTS;
                quantize(x + row * in_features + begin, std::min(GROUP_INPUTS, in_features - begin), row, group);
            }
    }

    const Quad* quads_of(int64_t row) const { return &quads[row * num_quads]; }
    const float* scales_of(int64_t row) const { return &scales[row * num_groups]; }
    const int32_t* starts_of(int64_t row) const { return &starts[row * num_groups]; }

   private:
    std::vector<Quad> quads;
    std::vector<float> scales;
    std::vector<int32_t> starts;

    void quantize(const Stored* x, int count, int64_t row, int group) {
        alignas(64) float values[GROUP_INPUTS] = {};
        alignas(64) int32_t integers[GROUP_INPUTS];
        for (int i = 0; i < count; i++) values[i] = widen(x[i]);
        Floats most = {}, invalid = {};
        for (int i = 0; i < GROUP_INPUTS; i += LANES) {
            const Floats value = *(Floats*)(values + i), size = value < 0.0f ? -value : value;
            most = size > most ? size : most;
            invalid += value * 0.0f;  // NaN if a value is NaN or infinite
        }
        float largest = 0, nan = 0;
        for (int i = 0; i < LANES; i++) largest = std::max(largest, most[i]), nan += invalid[i];
        const float steps = largest > 0 ? 127 / largest : 0, magic = 0x1.8p23f;  // adding `magic` rounds
        Ints sum = {};
        for (int i = 0; i < GROUP_INPUTS; i += LANES) {
            const Ints rounded = (Ints)(*(Floats*)(values + i) * steps + magic) - (Ints)(Floats{} + magic);
            *(Ints*)(integers + i) = rounded;
            sum += rounded;
        }
        int32_t total = 0;
        for (int i = 0; i < LANES; i++) total += sum[i];
        scales[row * num_groups + group] = largest / 127 + nan;
        starts[row * num_groups + group] = -128 * total;
        Quad* to = &quads[row * num_quads + group * (GROUP_INPUTS / QUAD)];
        for (int i = 0; i < round_up(count, QUAD) / QUAD; i++) {
            Quad::Integer ordered[QUAD];
            for (int j = 0; j < QUAD; j++) ordered[j] = integers[i * QUAD + Quad::ORDER[j]];
            std::memcpy(to[i].words, ordered, sizeof ordered);
        }
    }
};

// y [N, TILE] = N rows of x, from `row` on, times a tile [num_quads, TILE, QUAD] and its scales [TILE].
template <int N, int TILE>
void multiply_int8_rows(const Quantized& x, int64_t row, const uint8_t* tile, const float* scales, Stored* y,
                        int64_t y_stride) {
    // A single row is limited by reading the weights: it reads each cache line once.
    constexpr int WIDTH = TILE / LANES, TOGETHER = N == 1 ? WIDTH : SUMS;
    const Quad* quads[N];
    for (int i = 0; i < N; i++) quads[i] = x.quads_of(row + i);
    for (int column = 0; column < WIDTH; column += TOGETHER) {
        Floats totals[N][TOGETHER] = {};
        for (int group = 0; group < x.num_groups; group++) {
            const int begin = group * (GROUP_INPUTS / QUAD), end = std::min(begin + GROUP_INPUTS / QUAD, x.num_quads);
            Ints sums[N][TOGETHER];
            for (int i = 0; i < N; i++)
                for (int j = 0; j < TOGETHER; j++) sums[i][j] = Ints{} + x.starts_of(row + i)[group];
            for (int k = begin; k < end; k++)
                for (int j = 0; j < TOGETHER; j++) {
                    const Ints weights = *(const Ints*)(tile + (k * TILE + (column + j) * LANES) * QUAD);
                    for (int i = 0; i < N; i++) sums[i][j] = dot(sums[i][j], weights, quads[i][k]);
                }
            for (int i = 0; i < N; i++)
                for (int j = 0; j < TOGETHER; j++)
                    totals[i][j] += __builtin_convertvector(sums[i][j], Floats) * x.scales_of(row + i)[group];
        }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < TOGETHER; j++) {
                const int output = (column + j) * LANES;
                narrow(y + i * y_stride + output, totals[i][j] * *(const Floats*)(scales + output));
            }
    }
}

// The same for any number of rows, N at a time.
template <int TILE, int N = ROWS>
void multiply_int8_tile(const Quantized& x, int64_t row, int64_t rows, const uint8_t* tile, const float* scales,
                        Stored* y, int64_t y_stride) {
    for (; rows >= N; rows -= N, row += N, y += N * y_stride)
        multiply_int8_rows<N, TILE>(x, row, tile, scales, y, y_stride);
    if constexpr (N > 1) multiply_int8_tile<TILE, N - 1>(x, row, rows, tile, scales, y, y_stride);
}

}  // namespace
