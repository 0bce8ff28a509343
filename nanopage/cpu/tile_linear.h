// What tile_linear.cpp has for other files: products with weights in tiles.

#pragma once

#include <cstdint>
#include <vector>

#include "shim.h"

constexpr int TILE = 64;  // outputs

// How a matrix is stored in tiles (see tile_linear.py).
struct Layout {
    int64_t num_tiles;
    int64_t in_features, depth;     // of a tile; depth: its size in that dimension
    int64_t num_groups, per_group;  // groups of inputs with a scale, 0 if there are none; its numbers, with the offset
    int32_t dtype;
};

// Adjacent rows of activations, and the matrix that they are multiplied by.
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
