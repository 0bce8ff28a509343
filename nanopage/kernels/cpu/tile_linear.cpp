// Products with weights in tiles of int8 or bfloat16 (see tile_linear.py): y = x W^T, for any number of rows.
//
// A panel is a part of a tile of weights, up to PANEL inputs of TILE outputs. It is widened once, to what registers.h
// multiplies, and all rows of a block are multiplied by it. The compiler is given THREADS, and BFLOAT16 (see
// registers.h).

#include "registers.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int TILE = 64;         // outputs
constexpr int PANEL = 128;       // inputs
constexpr int BLOCK_ROWS = 192;  // a block's sums, and a panel, stay in the cache

typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
using Bfloat16 = uint16_t;

// Read LANES weights. GCC finds the instructions only where they are named.
Floats widen(const int8_t* from) {
#if defined(__AVX512F__)
    const Ints wide = (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    const Ints wide = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    const Ints wide = __builtin_convertvector(*(const Bytes*)from, Ints);
#endif
    return __builtin_convertvector(wide, Floats);
}

Floats widen(const Bfloat16* from) {
#if defined(__AVX512F__)
    const Ints wide = (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    const Ints wide = (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    const Ints wide = __builtin_convertvector(*(const Halves*)from, Ints);
#endif
    return (Floats)(wide << 16);
}

// Widen inputs of a tile, [depth, TILE] weights, to a panel, [ceil(depth / PER_WORD), TILE] words.
template <class Weight>
void widen_panel(const Weight* tile, int depth, Element* panel) {
    for (int i = 0; i < depth; i += PER_WORD)
        for (int j = 0; j < TILE; j += LANES) {
            const Weight* from = tile + i * TILE + j;
#ifdef BFLOAT16_PRODUCTS
            const Ints low = (Ints)widen(from), high = i + 1 < depth ? (Ints)widen(from + TILE) : Ints{};
            *(Ints*)(panel + i * TILE + j * PER_WORD) =
                (Ints)((Unsigned)low >> 16) | high;  // both kinds of weights are exact in bfloat16
#else
            *(Floats*)(panel + i * TILE + j) = widen(from);
#endif
        }
}

// The same as multiply_tile for a single row. It is limited by reading the weights, so they are widened in registers.
template <class Weight>
void multiply_row(const Stored* x, const Weight* tile, const float* scales, int in_features, Stored* y) {
    Floats sums[TILE / LANES] = {};
    for (int i = 0; i < in_features; i++)
        for (int j = 0; j < TILE / LANES; j++) sums[j] += widen(x[i]) * widen(tile + i * TILE + j * LANES);
    for (int j = 0; j < TILE; j++) y[j] = narrow(sums[j / LANES][j % LANES] * scales[j]);
}

// y [rows, TILE] = x [rows, in_features] times a tile, [in_features, TILE], and its scales, [TILE]. Rows of x are
// `stride` words apart, and those of y `y_stride` elements.
template <class Weight>
void multiply_tile(const Element* x, int stride, int rows, const Weight* tile, const float* scales, int in_features,
                   Stored* y, int64_t y_stride) {
    alignas(64) static thread_local Element panel[PANEL * TILE];
    alignas(64) static thread_local float sums[BLOCK_ROWS * TILE];
    for (int begin = 0; begin < in_features; begin += PANEL) {
        const int depth = std::min(PANEL, in_features - begin), words = round_up(depth, PER_WORD) / PER_WORD;
        widen_panel(tile + begin * TILE, depth, panel);
        if (begin == 0)
            multiply<TILE, false>(x, stride, words, panel, sums, rows);
        else
            multiply<TILE, true>(x + begin, stride, words, panel, sums, rows);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < TILE; j++) y[i * y_stride + j] = narrow(sums[i * TILE + j] * scales[j]);
}

// y [rows, num_tiles * TILE] = x [rows, in_features] times the tiles, [num_tiles, in_features, TILE].
template <class Weight>
void multiply_tiles(const Stored* x, int64_t rows, const Weight* tiles, int64_t num_tiles, int64_t in_features,
                    const float* scales, Stored* y) {
    const auto tile_of = [&](int64_t i) { return tiles + i * in_features * TILE; };
    if (rows == 1) {
#pragma omp parallel for num_threads(THREADS)
        for (int64_t i = 0; i < num_tiles; i++)
            multiply_row(x, tile_of(i), scales + i * TILE, in_features, y + i * TILE);
        return;
    }
    // Rows of x as elements that are multiplied, of a whole number of words.
    const int64_t length = round_up(in_features, PER_WORD);
    std::vector<Element> copy;
    auto elements = (const Element*)x;
    if (length != in_features || !std::is_same_v<Element, Stored>) {
        copy.resize(rows * length);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < in_features; j++) copy[i * length + j] = element(x[i * in_features + j]);
        elements = copy.data();
    }
#pragma omp parallel for num_threads(THREADS) collapse(2) schedule(dynamic)
    for (int64_t begin = 0; begin < rows; begin += BLOCK_ROWS)
        for (int64_t i = 0; i < num_tiles; i++)
            multiply_tile(elements + begin * length, length / PER_WORD, std::min<int64_t>(BLOCK_ROWS, rows - begin),
                          tile_of(i), scales + i * TILE, in_features, y + (begin * num_tiles + i) * TILE,
                          num_tiles * TILE);
}

}  // namespace

// torch/csrc/inductor/aoti_torch/c/shim.h
extern "C" int aoti_torch_get_data_ptr(void* tensor, void** address);
extern "C" int aoti_torch_get_sizes(void* tensor, int64_t** sizes);
extern "C" int aoti_torch_empty_strided(int64_t num_dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, void** tensor);
extern "C" int aoti_torch_get_dtype(void* tensor, int32_t* dtype);
extern "C" int32_t aoti_torch_device_type_cpu();
extern "C" int32_t aoti_torch_dtype_int8();

// The operator nanopage::tile_linear, as Inductor calls it: x [rows, in_features], tiles [N, in_features, TILE] and
// scales [N, TILE] -> y [rows, N * TILE]. Returns 0, or the code of an error.
extern "C" int aoti_torch_cpu_tile_linear(void* x_tensor, void* tiles_tensor, void* scales_tensor, void** y_tensor) {
    int64_t *x_sizes, *tiles_sizes;
    int32_t dtype, weight_dtype;
    void *x, *tiles, *scales, *y;
    int error = aoti_torch_get_sizes(x_tensor, &x_sizes);
    error = error ? error : aoti_torch_get_sizes(tiles_tensor, &tiles_sizes);
    error = error ? error : aoti_torch_get_dtype(x_tensor, &dtype);
    error = error ? error : aoti_torch_get_dtype(tiles_tensor, &weight_dtype);
    if (error) return error;
    const int64_t rows = x_sizes[0], in_features = x_sizes[1], num_tiles = tiles_sizes[0];
    const int64_t sizes[] = {rows, num_tiles * TILE}, strides[] = {num_tiles * TILE, 1};
    error = aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, y_tensor);
    error = error ? error : aoti_torch_get_data_ptr(x_tensor, &x);
    error = error ? error : aoti_torch_get_data_ptr(tiles_tensor, &tiles);
    error = error ? error : aoti_torch_get_data_ptr(scales_tensor, &scales);
    error = error ? error : aoti_torch_get_data_ptr(*y_tensor, &y);
    if (error) return error;
    const auto multiply = [&](auto* weights) {
        multiply_tiles((const Stored*)x, rows, weights, num_tiles, in_features, (const float*)scales, (Stored*)y);
    };
    if (weight_dtype == aoti_torch_dtype_int8())
        multiply((const int8_t*)tiles);
    else
        multiply((const Bfloat16*)tiles);
    return 0;
}
