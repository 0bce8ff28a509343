// Products with weights in tiles of 8 or 4 bits, bfloat16 or float16 (see tile_linear.py): y = x W^T, for any number of
// rows.
//
// Weights of 16 bits are widened. A panel is a part of a tile, up to PANEL inputs of TILE outputs. It is widened once,
// to what registers.h multiplies, and all rows of a block are multiplied by it. The compiler is given BFLOAT16 (see
// registers.h).

#include "integer_products.h"
#include "shim.h"

namespace {

constexpr int TILE = 64;         // outputs
constexpr int PANEL = 128;       // inputs
constexpr int BLOCK_ROWS = 192;  // a block's sums, and a panel, stay in the cache

// Widen inputs of a tile, [depth, TILE] weights, to a panel, [ceil(depth / PER_WORD), TILE] words.
template <class Weight>
void widen_panel(const Weight* tile, int depth, Element* panel) {
    for (int i = 0; i < depth; i += PER_WORD)
        for (int j = 0; j < TILE; j += LANES) {
            const Weight* from = tile + i * TILE + j;
#ifdef BFLOAT16_PRODUCTS
            const Ints low = (Ints)widen(from), high = i + 1 < depth ? (Ints)widen(from + TILE) : Ints{};
            *(Ints*)(panel + i * TILE + j * PER_WORD) = (Ints)((Unsigned)low >> 16) | high;
#else
            *(Floats*)(panel + i * TILE + j) = widen(from);
#endif
        }
}

// The same as multiply_tile for a single row. It is limited by reading the weights, so they are widened in registers.
template <class Weight>
void multiply_row(const Stored* x, const Weight* tile, int in_features, Stored* y) {
    Floats sums[TILE / LANES] = {};
    for (int i = 0; i < in_features; i++)
        for (int j = 0; j < TILE / LANES; j++) sums[j] += widen(x[i]) * widen(tile + i * TILE + j * LANES);
    for (int j = 0; j < TILE / LANES; j++) narrow(y + j * LANES, sums[j]);
}

// y [rows, TILE] = x [rows, in_features] times a tile, [in_features, TILE]. Rows of x are `stride` words apart, and
// those of y `y_stride` elements.
template <class Weight>
void multiply_tile(const Element* x, int stride, int rows, const Weight* tile, int in_features, Stored* y,
                   int64_t y_stride) {
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
        for (int j = 0; j < TILE; j += LANES) narrow(y + i * y_stride + j, *(Floats*)(sums + i * TILE + j));
}

// Call multiply(first row, number of rows, tile) for all tiles and rows, by all threads.
template <class Multiply>
void for_each_block(int64_t rows, int64_t num_tiles, Multiply multiply) {
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
        for (int64_t i = 0; i < num_tiles; i++) multiply(row, std::min<int64_t>(BLOCK_ROWS, rows - row), i);
}

// y [rows, num_tiles * TILE] = x [rows, in_features] times the tiles, [num_tiles, in_features, TILE].
template <class Weight>
void multiply_floats(const Stored* x, int64_t rows, const Weight* tiles, int64_t num_tiles, int64_t in_features,
                     Stored* y) {
    const auto tile_of = [&](int64_t i) { return tiles + i * in_features * TILE; };
    if (rows == 1) {
#pragma omp parallel for
        for (int64_t i = 0; i < num_tiles; i++) multiply_row(x, tile_of(i), in_features, y + i * TILE);
        return;
    }
    // Rows of x as elements that are multiplied, of a whole number of words.
    const int64_t length = round_up(in_features, PER_WORD), y_stride = num_tiles * TILE;
    std::vector<Element> copy;
    auto elements = (const Element*)x;
    if (length != in_features || (PER_WORD == 1 && BFLOAT16)) {
        copy.resize(rows * length);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < in_features; j++) copy[i * length + j] = element(x[i * in_features + j]);
        elements = copy.data();
    }
    for_each_block(rows, num_tiles, [&](int64_t row, int count, int64_t i) {
        multiply_tile(elements + row * length, length / PER_WORD, count, tile_of(i), in_features,
                      y + row * y_stride + i * TILE, y_stride);
    });
}

// The same with weights of integers. The scales of a tile take `scale_bytes`.
template <class Format>
void multiply_integers(const Stored* x, int64_t rows, const uint8_t* tiles, int64_t num_tiles, int64_t in_features,
                       const void* scales, int64_t scale_bytes, Stored* y) {
    const Quantized<Format::GROUP> quantized(x, rows, in_features);
    const int64_t tile_bytes = quantized.num_quads / Format::QUADS * QUAD * TILE, y_stride = num_tiles * TILE;
    const auto multiply = [&](int64_t row, int count, int64_t i) {
        const Tile<Format> tile = {tiles + i * tile_bytes, (const char*)scales + i * scale_bytes};
        multiply_integer_tile<Format, TILE>(quantized, row, count, tile, y + row * y_stride + i * TILE, y_stride);
    };
    if (rows > 1) return for_each_block(rows, num_tiles, multiply);
#pragma omp parallel for  // each thread has the same tiles in every step
    for (int64_t i = 0; i < num_tiles; i++) multiply(0, 1, i);
}

}  // namespace

// The operator nanopage::tile_linear, as Inductor calls it: x [rows, in_features], tiles and scales -> y
// [rows, num_tiles * TILE]. What the weights are follows from the types and sizes of tiles and scales. Returns 0, or
// the code of an error.
extern "C" int aoti_torch_cpu_tile_linear(void* x_tensor, void* tiles_tensor, void* scales_tensor, void** y_tensor) {
    int64_t *x_sizes, *tiles_sizes, *scales_sizes;
    int32_t dtype, tiles_dtype, scales_dtype;
    void *x, *tiles, *scales, *y;
    int error = aoti_torch_get_sizes(x_tensor, &x_sizes);
    error = error ? error : aoti_torch_get_sizes(tiles_tensor, &tiles_sizes);
    error = error ? error : aoti_torch_get_sizes(scales_tensor, &scales_sizes);
    error = error ? error : aoti_torch_get_dtype(x_tensor, &dtype);
    error = error ? error : aoti_torch_get_dtype(tiles_tensor, &tiles_dtype);
    error = error ? error : aoti_torch_get_dtype(scales_tensor, &scales_dtype);
    if (error) return error;
    const int64_t rows = x_sizes[0], in_features = x_sizes[1], num_tiles = tiles_sizes[0];
    const int64_t sizes[] = {rows, num_tiles * TILE}, strides[] = {num_tiles * TILE, 1};
    error = aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, y_tensor);
    error = error ? error : aoti_torch_get_data_ptr(x_tensor, &x);
    error = error ? error : aoti_torch_get_data_ptr(tiles_tensor, &tiles);
    error = error ? error : aoti_torch_get_data_ptr(scales_tensor, &scales);
    error = error ? error : aoti_torch_get_data_ptr(*y_tensor, &y);
    if (error) return error;
    const auto multiply_wide = [&](auto weights) {
        multiply_floats((const Stored*)x, rows, weights, num_tiles, in_features, (Stored*)y);
        return 0;
    };
    if (tiles_dtype == aoti_torch_dtype_bfloat16()) return multiply_wide((const Bfloat16*)tiles);
#if !BFLOAT16  // activations of a float16 checkpoint are float32
    if (tiles_dtype == aoti_torch_dtype_float16()) return multiply_wide((const Float16*)tiles);
#else
    if (tiles_dtype == aoti_torch_dtype_float16()) return 1;
#endif
    const auto multiply = [&](auto format, int64_t scale_bytes) {
        multiply_integers<decltype(format)>((const Stored*)x, rows, (const uint8_t*)tiles, num_tiles, in_features,
                                            scales, scale_bytes, (Stored*)y);
        return 0;
    };
    if (scales_dtype == aoti_torch_dtype_float32()) return multiply(PerOutput{}, TILE * sizeof(float));
    const int64_t num_groups = scales_sizes[1], per_group = scales_sizes[2];
    const int64_t scale_bytes = num_groups * per_group * TILE * sizeof(uint16_t);
    const bool small = in_features == 16 * num_groups, offset = per_group == 2;
    if (tiles_sizes[1] * 8 == in_features) return multiply(Format<4, 32, true, true>{}, scale_bytes);
    if (small && offset) return multiply(Format<8, 16, true, true>{}, scale_bytes);
    if (small) return multiply(Format<8, 16, true, false>{}, scale_bytes);
    if (offset) return multiply(Format<8, 32, true, true>{}, scale_bytes);
    return multiply(Format<8, 32, true, false>{}, scale_bytes);
}
