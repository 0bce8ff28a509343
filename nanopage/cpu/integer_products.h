// Products with weights of 8 or 4 bits: y = x W^T. x becomes int8 (W8A8), because processors multiply and add four int8
// at once (VNNI), or two (AVX2).
//
// A group of inputs of a row of x is divided by its largest magnitude and rounded to 127 steps on either side of zero.
// Instructions multiply unsigned by signed integers, so weights of 8 bits are stored as unsigned bytes, with
// 128 added, and each sum begins with -128 times the sum of the activations. Integer sums are exact.

#pragma once

#include "registers.h"

namespace {

constexpr int QUAD = 4;  // inputs whose weights are adjacent in memory

// How the weights of a tile are stored.
template <int BITS_, int GROUP_, bool SCALED_, bool OFFSET_>
struct Format {
    static constexpr int BITS = BITS_;       // of a weight: 8 or 4
    static constexpr int GROUP = GROUP_;     // inputs that share a scale of their activations
    static constexpr bool SCALED = SCALED_;  // true: a scale for each group; false: one for each output
    static constexpr bool OFFSET = OFFSET_;  // whether groups have an offset, too: weight = scale * integer - offset
    static constexpr int QUADS = 8 / BITS;   // the number of quads that share bytes
};

constexpr int GROUP_INPUTS = 64;  // as in tile_linear.py
using PerOutput = Format<8, GROUP_INPUTS, false, false>;

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define DOT_PRODUCT _mm512_dpbusd_epi32
using Register = __m512i;
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define DOT_PRODUCT _mm256_dpbusd_avx_epi32
using Register = __m256i;
#endif

// Four activations in the form that `dot` multiplies.
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

// In each lane: sum + the products of the lane's four weights, which are bytes, and x.
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

// A group of a row, without its integers.
struct Group {
    float scale;    // of the activations
    float sum;      // of the rounded activations
    int32_t start;  // the first term of integer sums with weights of 8 bits
};

// Rows of x in int8, in groups of GROUP inputs. The last quad is padded with zeros.
template <int GROUP>
class Quantized {
   public:
    const int num_quads, num_groups;  // of a row

    Quantized(const Stored* x, int64_t rows, int in_features)
        : num_quads(round_up(in_features, QUAD) / QUAD),
          num_groups(round_up(in_features, GROUP) / GROUP),
          quads(rows * num_quads),
          groups(rows * num_groups) {
#pragma omp parallel for if (rows * in_features > 1 << 16)
        for (int64_t row = 0; row < rows; row++)
            for (int group = 0; group < num_groups; group++) {
                const int begin = group * GROUP;
                quantize(x + row * in_features + begin, std::min(GROUP, in_features - begin), row, group);
            }
    }

    const Quad* quads_of(int64_t row) const { return &quads[row * num_quads]; }
    const Group* groups_of(int64_t row) const { return &groups[row * num_groups]; }

   private:
    std::vector<Quad> quads;
    std::vector<Group> groups;

    void quantize(const Stored* x, int count, int64_t row, int group) {
        alignas(64) float values[GROUP] = {};
        alignas(64) int32_t integers[GROUP];
        for (int i = 0; i < count; i++) values[i] = widen(x[i]);
        Floats most = {}, invalid = {};
        for (int i = 0; i < GROUP; i += LANES) {
            const Floats value = *(Floats*)(values + i), size = value < 0.0f ? -value : value;
            most = size > most ? size : most;
            invalid += value * 0.0f;  // NaN if a value is NaN or infinite
        }
        float largest = 0, nan = 0;
        for (int i = 0; i < LANES; i++) largest = std::max(largest, most[i]), nan += invalid[i];
        const float steps = largest > 0 ? 127 / largest : 0, magic = 0x1.8p23f;  // adding `magic` rounds
        Ints sum = {};
        for (int i = 0; i < GROUP; i += LANES) {
            const Ints rounded = (Ints)(*(Floats*)(values + i) * steps + magic) - (Ints)(Floats{} + magic);
            *(Ints*)(integers + i) = rounded;
            sum += rounded;
        }
        int32_t total = 0;
        for (int i = 0; i < LANES; i++) total += sum[i];
        const float scale = largest / 127 + nan;
        groups[row * num_groups + group] = {scale, scale * total, -128 * total};
        Quad* to = &quads[row * num_quads + group * (GROUP / QUAD)];
        for (int i = 0; i < round_up(count, QUAD) / QUAD; i++) {
            Quad::Integer ordered[QUAD];
            for (int j = 0; j < QUAD; j++) ordered[j] = integers[i * QUAD + Quad::ORDER[j]];
            std::memcpy(to[i].words, ordered, sizeof ordered);
        }
    }
};

// A tile [num_quads / QUADS, TILE, QUAD] of bytes, and its scales: float [TILE], or for each group of inputs 16-bit
// floats [num_groups, TILE], or with offsets [num_groups, 2, TILE]. With 4 bits, the low halves of bytes are the
// weights of one quad, and the high halves are the weights of the next quad.
template <class Format>
struct Tile {
    const uint8_t* weights;
    const void* scales;
};

// y [N, TILE] = N rows of x, from `row` on, times a tile.
template <class Format, int TILE, int N>
void multiply_integer_rows(const Quantized<Format::GROUP>& x, int64_t row, const Tile<Format>& tile, Stored* y,
                           int64_t y_stride) {
    // Reading the weights limits a single row, so it reads each cache line once. With offsets, the sums of many rows
    // must leave registers for scales and offsets.
    constexpr int WIDTH = TILE / LANES, TOGETHER = N == 1 ? WIDTH : Format::OFFSET ? std::max(1, SUMS / 2) : SUMS;
    constexpr int QUADS = Format::QUADS, DEPTH = Format::GROUP / QUAD / QUADS;
    const auto halves = (const Float16*)tile.scales;
    const Quad* quads[N];
    const Group* groups[N];
    for (int i = 0; i < N; i++) quads[i] = x.quads_of(row + i), groups[i] = x.groups_of(row + i);
    for (int column = 0; column < WIDTH; column += TOGETHER) {
        Floats totals[N][TOGETHER] = {};
        for (int group = 0; group < x.num_groups; group++) {
            const int begin = group * DEPTH, end = std::min(begin + DEPTH, x.num_quads / QUADS);
            Ints sums[N][TOGETHER];
            for (int i = 0; i < N; i++)
                for (int j = 0; j < TOGETHER; j++)
                    sums[i][j] = Format::BITS == 8 ? Ints{} + groups[i][group].start : Ints{};
            for (int k = begin; k < end; k++)
                for (int j = 0; j < TOGETHER; j++) {
                    const Ints bytes = *(const Ints*)(tile.weights + (k * TILE + (column + j) * LANES) * QUAD);
                    if constexpr (Format::BITS == 8) {
                        for (int i = 0; i < N; i++) sums[i][j] = dot(sums[i][j], bytes, quads[i][k]);
                    } else {
                        const Ints low = bytes & 0x0f0f0f0f, high = (Ints)((Unsigned)bytes >> 4) & 0x0f0f0f0f;
                        for (int i = 0; i < N; i++) {
                            sums[i][j] = dot(sums[i][j], low, quads[i][2 * k]);
                            sums[i][j] = dot(sums[i][j], high, quads[i][2 * k + 1]);
                        }
                    }
                }
            for (int j = 0; j < TOGETHER; j++) {
                const Float16* from = halves + group * (Format::OFFSET ? 2 : 1) * TILE + (column + j) * LANES;
                const Floats scale = Format::SCALED ? widen(from) : Floats{} + 1;
                const Floats offset = Format::OFFSET ? widen(from + TILE) : Floats{};
                for (int i = 0; i < N; i++) {
                    const Floats sum = __builtin_convertvector(sums[i][j], Floats);
                    const Floats scaled = Format::SCALED ? sum * scale : sum;
                    totals[i][j] = fused(scaled, groups[i][group].scale - Floats{}, totals[i][j]);
                    if constexpr (Format::OFFSET)
                        totals[i][j] = fused(offset, -groups[i][group].sum - Floats{}, totals[i][j]);
                }
            }
        }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < TOGETHER; j++) {
                const int output = (column + j) * LANES;
                Floats total = totals[i][j];
                if constexpr (!Format::SCALED) total *= *(const Floats*)((const float*)tile.scales + output);
                narrow(y + i * y_stride + output, total);
            }
    }
}

// The same for any number of rows, N at a time.
template <class Format, int TILE, int N = ROWS>
void multiply_integer_tile(const Quantized<Format::GROUP>& x, int64_t row, int64_t rows, const Tile<Format>& tile,
                           Stored* y, int64_t y_stride) {
    for (; rows >= N; rows -= N, row += N, y += N * y_stride)
        multiply_integer_rows<Format, TILE, N>(x, row, tile, y, y_stride);
    if constexpr (N > 1) multiply_integer_tile<Format, TILE, N - 1>(x, row, rows, tile, y, y_stride);
}

}  // namespace
