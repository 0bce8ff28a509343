// Products with weights in tiles of 8 or 4 bits, bfloat16 or float16 (see tile_linear.py): y = x W^T, for any number of
// rows.
//
// Weights of 16 bits are widened. A panel is a part of a tile, up to PANEL inputs of TILE outputs. It is widened once,
// to what registers.h multiplies, and all rows of a block are multiplied by it. The compiler is given BFLOAT16 (see
// registers.h).

#include "tile_linear.h"

#include "integer_products.h"

namespace {

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

// Call multiply(rows, tile of their matrix) for all tiles and rows, at most BLOCK_ROWS at once, by all threads.
template <class Multiply>
void for_each_block(const std::vector<Rows>& groups, int64_t num_tiles, Multiply multiply) {
    std::vector<Rows> blocks;
    bool single = true;
    for (const Rows& group : groups)
        for (int64_t done = 0; done < group.count; done += BLOCK_ROWS) {
            const int64_t count = std::min<int64_t>(BLOCK_ROWS, group.count - done);
            blocks.push_back({group.begin + done, count, group.matrix});
            single = single && count == 1;
        }
    const int64_t count = blocks.size() * num_tiles;
    const auto run = [&](int64_t i) {
        const Rows& rows = blocks[i / num_tiles];
        multiply(rows, i % num_tiles, rows.matrix * num_tiles + i % num_tiles);
    };
    if (single) {
#pragma omp parallel for schedule(static)  // each thread has the same tiles in every step
        for (int64_t i = 0; i < count; i++) run(i);
    } else {
#pragma omp parallel for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) run(i);
    }
}

// multiply_tiles with weights of this type.
template <class Weight>
void multiply_floats(const Weights& weights, const Stored* x, int64_t num_rows, const std::vector<Rows>& groups,
                     Stored* y) {
    // Rows of x as elements that are multiplied, of a whole number of words.
    const int64_t in_features = weights.in_features, length = round_up(in_features, PER_WORD);
    const int64_t y_stride = weights.num_tiles * TILE;
    std::vector<Element> copy;
    auto elements = (const Element*)x;
    const bool several = std::any_of(groups.begin(), groups.end(), [](const Rows& group) { return group.count > 1; });
    if (several && (length != in_features || (PER_WORD == 1 && BFLOAT16))) {
        copy.resize(num_rows * length);
        for (int64_t i = 0; i < num_rows; i++)
            for (int64_t j = 0; j < in_features; j++) copy[i * length + j] = element(x[i * in_features + j]);
        elements = copy.data();
    }
    for_each_block(groups, weights.num_tiles, [&](const Rows& rows, int64_t column, int64_t i) {
        const Weight* tile = (const Weight*)weights.tiles + i * in_features * TILE;
        Stored* to = y + rows.begin * y_stride + column * TILE;
        if (rows.count == 1) return multiply_row(x + rows.begin * in_features, tile, in_features, to);
        multiply_tile(elements + rows.begin * length, length / PER_WORD, rows.count, tile, in_features, to, y_stride);
    });
}

// The same with weights of integers. The scales of a tile take `scale_bytes`.
template <class Format>
void multiply_integers(const Weights& weights, int64_t scale_bytes, const Stored* x, int64_t num_rows,
                       const std::vector<Rows>& groups, Stored* y) {
    const Quantized<Format::GROUP> quantized(x, num_rows, weights.in_features);
    const int64_t tile_bytes = quantized.num_quads / Format::QUADS * QUAD * TILE;
    const int64_t y_stride = weights.num_tiles * TILE;
    for_each_block(groups, weights.num_tiles, [&](const Rows& rows, int64_t column, int64_t i) {
        const auto tiles = (const uint8_t*)weights.tiles + i * tile_bytes;
        const Tile<Format> tile = {tiles, (const char*)weights.scales + i * scale_bytes};
        Stored* to = y + rows.begin * y_stride + column * TILE;
        multiply_integer_tile<Format, TILE>(quantized, rows.begin, rows.count, tile, to, y_stride);
    });
}

}  // namespace

int weights_of(void* tiles, void* scales, int64_t in_features, Weights* weights) {
    int64_t dims, scales_dims, *sizes, *scales_sizes;
    int error = aoti_torch_get_dim(tiles, &dims);
    error = error ? error : aoti_torch_get_dim(scales, &scales_dims);
    error = error ? error : aoti_torch_get_sizes(tiles, &sizes);
    error = error ? error : aoti_torch_get_sizes(scales, &scales_sizes);
    error = error ? error : aoti_torch_get_dtype(tiles, &weights->dtype);
    error = error ? error : aoti_torch_get_dtype(scales, &weights->scales_dtype);
    error = error ? error : aoti_torch_get_data_ptr(tiles, &weights->tiles);
    error = error ? error : aoti_torch_get_data_ptr(scales, &weights->scales);
    if (error) return error;
    weights->in_features = in_features;
    weights->scaled_groups = weights->scales_dtype != aoti_torch_dtype_float32();
    const bool integers = weights->dtype == aoti_torch_dtype_uint8();
    weights->num_tiles = sizes[dims - (integers ? 4 : 3)];
    weights->depth = sizes[dims - (integers ? 3 : 2)];
    weights->num_groups = weights->scaled_groups ? scales_sizes[scales_dims - 3] : 0;
    weights->per_group = weights->scaled_groups ? scales_sizes[scales_dims - 2] : 0;
    return 0;
}

int multiply_tiles(const Weights& weights, const void* x, int64_t num_rows, const std::vector<Rows>& groups, void* y) {
    const auto multiply_wide = [&](auto weight) {
        multiply_floats<decltype(weight)>(weights, (const Stored*)x, num_rows, groups, (Stored*)y);
        return 0;
    };
    if (weights.dtype == aoti_torch_dtype_bfloat16()) return multiply_wide(Bfloat16{});
#if !BFLOAT16  // activations of a float16 or float32 checkpoint are float32
    if (weights.dtype == aoti_torch_dtype_float16()) return multiply_wide(Float16{});
    if (weights.dtype == aoti_torch_dtype_float32()) return multiply_wide(float{});
#endif
    if (weights.dtype != aoti_torch_dtype_uint8()) return 1;
    const auto multiply = [&](auto format, int64_t scale_bytes) {
        multiply_integers<decltype(format)>(weights, scale_bytes, (const Stored*)x, num_rows, groups, (Stored*)y);
        return 0;
    };
    if (!weights.scaled_groups) return multiply(PerOutput{}, TILE * sizeof(float));
    const int64_t scale_bytes = weights.num_groups * weights.per_group * TILE * sizeof(uint16_t);
    const bool small = weights.in_features == 16 * weights.num_groups, offset = weights.per_group == 2;
    if (weights.depth * 8 == weights.in_features) return multiply(Format<4, 32, true, true>{}, scale_bytes);
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
// [rows, num_tiles * TILE]. What the weights are follows from the types and sizes of tiles and scales. Returns 0, or
// the code of an error.
extern "C" int aoti_torch_cpu_tile_linear(void* x_tensor, void* tiles, void* scales, void** y_tensor) {
    int64_t* sizes;
    void *x, *y;
    Weights weights;
    int error = aoti_torch_get_sizes(x_tensor, &sizes);
    error = error ? error : weights_of(tiles, scales, sizes[1], &weights);
    error = error ? error : new_matrix(sizes[0], weights.num_tiles * TILE, x_tensor, y_tensor);
    error = error ? error : aoti_torch_get_data_ptr(x_tensor, &x);
    error = error ? error : aoti_torch_get_data_ptr(*y_tensor, &y);
    return error ? error : multiply_tiles(weights, x, sizes[0], {{0, sizes[0], 0}}, y);
}
