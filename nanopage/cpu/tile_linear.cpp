// Products with weights in tiles of 8 or 4 bits, bfloat16 or float16 (see tile_linear.py): y = x W^T, for any number of
// rows.
//
// Weights of 16 bits are widened to what registers.h multiplies. A product of few rows widens them as it reads them. A
// product of more rows widens one panel at a time (a part of a tile: up to PANEL inputs of TILE outputs), and
// multiplies all rows of a block by it. The compiler is given BFLOAT16 (see registers.h).

#include "tile_linear.h"

#include "integer_products.h"

namespace {

constexpr int PANEL = 128;       // inputs
constexpr int BLOCK_ROWS = 192;  // a block's sums, and a panel, stay in the cache
// The most rows that are multiplied without a panel. Without AVX-512, the sums of two rows do not fit into registers.
constexpr int FEW_ROWS = VECTORS * LANES == TILE ? 2 * ROWS : 1;

// Widen LANES weights of an input, at `from`. With PER_WORD = 2, also those of the next input, unless this is the last.
template <class Weight>
Words words_of(const Weight* from, [[maybe_unused]] bool last) {
#ifdef BFLOAT16_PRODUCTS
    if (last) return (Words)((Unsigned)widen(from) >> 16);
#endif
    return words_at(from, TILE);
}

// Widen inputs of a tile, [depth, TILE] weights, to a panel, [ceil(depth / PER_WORD), TILE] words.
template <class Weight>
void widen_panel(const Weight* tile, int depth, Element* panel) {
    for (int i = 0; i < depth; i += PER_WORD)
        for (int j = 0; j < TILE; j += LANES)
            *(Words*)(panel + i * TILE + j * PER_WORD) = words_of(tile + i * TILE + j, i + 1 == depth);
}

// The same as multiply_tile for a few rows, N at a time. Reading the weights limits them, so the weights are widened in
// registers.
template <class Weight, int N = std::min(FEW_ROWS, ROWS)>
void multiply_few(const Element* x, int stride, int rows, const Weight* tile, int in_features, Stored* y,
                  int64_t y_stride) {
    constexpr int WIDTH = TILE / LANES;
    const auto words = (const Word __attribute__((may_alias))*)x;
    int i = 0;
    for (; i + N <= rows; i += N) {
        Floats sums[N][WIDTH] = {};
        const auto add = [&](int k, bool last) {
            for (int j = 0; j < WIDTH; j++) {
                const Words weights = words_of(tile + k * PER_WORD * TILE + j * LANES, last);
                for (int n = 0; n < N; n++) sums[n][j] = multiply_add(sums[n][j], words[(i + n) * stride + k], weights);
            }
        };
        for (int k = 0; k < in_features / PER_WORD; k++) add(k, false);
        if (in_features % PER_WORD) add(in_features / PER_WORD, true);
        for (int n = 0; n < N; n++)
            for (int j = 0; j < WIDTH; j++) narrow(y + (i + n) * y_stride + j * LANES, sums[n][j]);
    }
    if constexpr (N > 1)
        multiply_few<Weight, N - 1>(x + i * stride * PER_WORD, stride, rows - i, tile, in_features, y + i * y_stride,
                                    y_stride);
}

// y [rows, TILE] = x [rows, in_features] times a tile, [in_features, TILE]. Rows of x are `stride` words apart, and
// rows of y are `y_stride` elements apart.
template <class Weight>
void multiply_tile(const Element* x, int stride, int rows, const Weight* tile, int in_features, Stored* y,
                   int64_t y_stride) {
    if (rows <= FEW_ROWS) return multiply_few(x, stride, rows, tile, in_features, y, y_stride);
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

// Call multiply(rows, index of a tile) for all tiles and rows, at most BLOCK_ROWS rows at once, by all threads.
template <class Multiply>
void for_each_block(const std::vector<Rows>& groups, int64_t num_tiles, Multiply multiply) {
    std::vector<Rows> blocks;
    bool single = true;
    for (const Rows& group : groups)
        for (int64_t done = 0; done < group.count; done += BLOCK_ROWS) {
            const int64_t count = std::min<int64_t>(BLOCK_ROWS, group.count - done);
            blocks.push_back({group.begin + done, count, group.tiles, group.scales});
            single = single && count == 1;
        }
    const int64_t count = blocks.size() * num_tiles;
    if (single) {
#pragma omp parallel for schedule(static)  // each thread has the same tiles in every step
        for (int64_t i = 0; i < count; i++) multiply(blocks[i / num_tiles], i % num_tiles);
    } else {
#pragma omp parallel for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) multiply(blocks[i / num_tiles], i % num_tiles);
    }
}

// multiply_tiles with weights of this type.
template <class Weight>
void multiply_floats(const Layout& layout, const Stored* x, int64_t num_rows, const std::vector<Rows>& groups,
                     Stored* y) {
    // Rows of x in the type that is multiplied, padded to a whole number of words.
    const int64_t in_features = layout.in_features, length = round_up(in_features, PER_WORD);
    const int64_t y_stride = layout.num_tiles * TILE;
    std::vector<Element> copy;
    auto elements = (const Element*)x;
    if (length != in_features || (PER_WORD == 1 && BFLOAT16)) {
        copy.resize(num_rows * length);
        for (int64_t i = 0; i < num_rows; i++)
            for (int64_t j = 0; j < in_features; j++) copy[i * length + j] = element(x[i * in_features + j]);
        elements = copy.data();
    }
    for_each_block(groups, layout.num_tiles, [&](const Rows& rows, int64_t i) {
        const Weight* tile = (const Weight*)rows.tiles + i * in_features * TILE;
        multiply_tile(elements + rows.begin * length, length / PER_WORD, rows.count, tile, in_features,
                      y + rows.begin * y_stride + i * TILE, y_stride);
    });
}

// The same with integer weights. The scales of a tile take `scale_bytes`.
template <class Format>
void multiply_integers(const Layout& layout, int64_t scale_bytes, const Stored* x, int64_t num_rows,
                       const std::vector<Rows>& groups, Stored* y) {
    const Quantized<Format::GROUP> quantized(x, num_rows, layout.in_features);
    const int64_t tile_bytes = quantized.num_quads / Format::QUADS * QUAD * TILE, y_stride = layout.num_tiles * TILE;
    for_each_block(groups, layout.num_tiles, [&](const Rows& rows, int64_t i) {
        const auto tiles = (const uint8_t*)rows.tiles + i * tile_bytes;
        const Tile<Format> tile = {tiles, (const char*)rows.scales + i * scale_bytes};
        Stored* to = y + rows.begin * y_stride + i * TILE;
        multiply_integer_tile<Format, TILE>(quantized, rows.begin, rows.count, tile, to, y_stride);
    });
}

}  // namespace

int layout_of(void* tiles, void* scales, int64_t in_features, Layout* layout) {
    int64_t *sizes, *scales_sizes;
    int32_t scales_dtype;
    int error = aoti_torch_get_sizes(tiles, &sizes);
    error = error ? error : aoti_torch_get_sizes(scales, &scales_sizes);
    error = error ? error : aoti_torch_get_dtype(tiles, &layout->dtype);
    error = error ? error : aoti_torch_get_dtype(scales, &scales_dtype);
    if (error) return error;
    layout->num_tiles = sizes[0], layout->in_features = in_features, layout->depth = sizes[1];
    layout->num_groups = layout->per_group = 0;
    if (scales_dtype != aoti_torch_dtype_float32())
        layout->num_groups = scales_sizes[1], layout->per_group = scales_sizes[2];
    return 0;
}

int multiply_tiles(const Layout& layout, const void* x, int64_t num_rows, const std::vector<Rows>& groups, void* y) {
    const auto multiply_wide = [&](auto weight) {
        multiply_floats<decltype(weight)>(layout, (const Stored*)x, num_rows, groups, (Stored*)y);
        return 0;
    };
    if (layout.dtype == aoti_torch_dtype_bfloat16()) return multiply_wide(Bfloat16{});
#if !BFLOAT16  // activations of a float16 or float32 checkpoint are float32
    if (layout.dtype == aoti_torch_dtype_float16()) return multiply_wide(Float16{});
    if (layout.dtype == aoti_torch_dtype_float32()) return multiply_wide(float{});
#endif
    if (layout.dtype != aoti_torch_dtype_uint8()) return 1;
    const auto multiply = [&](auto format, int64_t scale_bytes) {
        multiply_integers<decltype(format)>(layout, scale_bytes, (const Stored*)x, num_rows, groups, (Stored*)y);
        return 0;
    };
    if (layout.num_groups == 0) return multiply(PerOutput{}, TILE * sizeof(float));
    const int64_t scale_bytes = layout.num_groups * layout.per_group * TILE * sizeof(uint16_t);
    const bool small = layout.in_features == 16 * layout.num_groups, offset = layout.per_group == 2;
    if (layout.depth * 8 == layout.in_features) return multiply(Format<4, 32, true, true>{}, scale_bytes);
    if (small && offset) return multiply(Format<8, 16, true, true>{}, scale_bytes);
    if (small) return multiply(Format<8, 16, true, false>{}, scale_bytes);
    if (offset) return multiply(Format<8, 32, true, true>{}, scale_bytes);
    return multiply(Format<8, 32, true, false>{}, scale_bytes);
}

int new_matrix(int64_t rows, int64_t columns, void* like, void** matrix) {
    int32_t dtype;
    if (const int error = aoti_torch_get_dtype(like, &dtype)) return error;
    const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
    return aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, matrix);
}

// The operator nanopage::tile_linear, as Inductor calls it: x [rows, in_features], tiles and scales -> y
// [rows, num_tiles * TILE]. The types and sizes of tiles and scales tell what the weights are. Returns 0, or
// the code of an error.
extern "C" int aoti_torch_cpu_tile_linear(void* x_tensor, void* tiles_tensor, void* scales_tensor, void** y_tensor) {
    int64_t* sizes;
    void *x, *tiles, *scales, *y;
    Layout layout;
    int error = aoti_torch_get_sizes(x_tensor, &sizes);
    error = error ? error : layout_of(tiles_tensor, scales_tensor, sizes[1], &layout);
    error = error ? error : new_matrix(sizes[0], layout.num_tiles * TILE, x_tensor, y_tensor);
    error = error ? error : aoti_torch_get_data_ptr(x_tensor, &x);
    error = error ? error : aoti_torch_get_data_ptr(tiles_tensor, &tiles);
    error = error ? error : aoti_torch_get_data_ptr(scales_tensor, &scales);
    error = error ? error : aoti_torch_get_data_ptr(*y_tensor, &y);
    return error ? error : multiply_tiles(layout, x, sizes[0], {{0, sizes[0], tiles, scales}}, y);
}
