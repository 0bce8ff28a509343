// What other files use of tile_linear.cpp: products with weights in tiles.

#pragma once

#include <cstdint>
#include <vector>

#include "shim.h"

constexpr int TILE = 64;  // outputs

// How a matrix is stored in tiles (see tile_linear.py).
struct Layout {
    int64_t num_tiles;
    int64_t in_features, depth;     // of a tile; depth: the tile's size in the dimension of inputs
    int64_t num_groups, per_group;  // groups of inputs with a scale, or 0; per_group: 1, or 2 with an offset
    int32_t dtype;
};

// Adjacent rows of activations, and the matrix that multiplies them.
struct Rows {
    int64_t begin, count;
    const void *tiles, *scales;
};

// The layout of a matrix. Returns 0, or the code of an error.
int layout_of(void* tiles, void* scales, int64_t in_features, Layout* layout);

// y [num_rows, num_tiles * TILE] = x [num_rows, in_features] times the matrix of each group of rows, by all threads.
// Both have the type of activations, and all matrices the same layout. Rows that are in no group are not computed.
// Returns 0, or 1 if there is no product with such weights.
int multiply_tiles(const Layout& layout, const void* x, int64_t num_rows, const std::vector<Rows>& groups, void* y);

// A new tensor [rows, columns] with the dtype of another one. Returns 0, or the code of an error.
int new_matrix(int64_t rows, int64_t columns, void* like, void** matrix);
