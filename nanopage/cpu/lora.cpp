// The products of LoRA adapters (adapters/layers.py): each token that has an adapter gets y + x A^T B, with A and B of
// its slot. Sums are float32. The compiler is given BFLOAT16 (see registers.h).
//
// Tokens are sorted by slot. The tokens of a slot are multiplied in blocks, so that a block reads the weights once. All
// threads first compute h = x A^T of all blocks, and then y + h B. Both read weights in the order of memory, because
// reading them limits decodes with different adapters.

#include <memory>

#include "registers.h"
#include "shim.h"

namespace {

constexpr int BLOCK = 16;       // tokens of a block: their x, and a task's part of A or B, stay in the cache
constexpr int TOKENS = 4;       // tokens of a block that registers hold at once
constexpr int RANKS = 4;        // rows of A or B that registers hold at once
constexpr int TASK_RANKS = 16;  // rows of A in a task
constexpr int OUTPUTS = 1024;   // columns of B in a task

struct Matrix {  // whose rows are contiguous
    Stored* numbers;
    int64_t stride;
    Stored* row(int64_t i) const { return numbers + i * stride; }
};

// The weights of all slots: A [slots, parts, rank, in] and B [slots, rank, out].
struct Adapters {
    const Stored *a, *b;
    int64_t num_slots, num_parts, rank, in_features, out_features;
    const int64_t* sizes;  // the outputs of each part
};

struct Block {  // tokens of one slot
    int64_t slot;
    const int64_t* tokens;
    int count;
    float* h;  // [count, parts * rank]
};

struct Columns {  // at most OUTPUTS columns of B, all of one part
    int64_t part, begin;
    int count;
};

#ifdef BFLOAT16_PRODUCTS
constexpr int NUMBERS = 2 * LANES;  // numbers in a register
Words load(const Bfloat16* from) { return *(const Words*)from; }
Floats add_products(Floats sum, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
constexpr int NUMBERS = LANES;
Floats load(const Stored* from) { return widen(from); }
Floats add_products(Floats sum, Floats a, Floats b) { return sum + a * b; }
#endif

float sum(Floats x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float pairs[LANES / 2], total = 0;
    for (int i = 0; i < LANES / 2; i++) pairs[i] = x[i] + x[i + LANES / 2];
    for (float pair : pairs) total += pair;
    return total;
#endif
}

// h [N, M] = x [N, length] times a [M, length] transposed. Rows of h are `h_stride` numbers apart.
template <int N, int M>
void multiply_by_a(const Stored* const* x, const Stored* a, int64_t length, float* h, int64_t h_stride) {
    Floats sums[N][M] = {};
    const int64_t whole = length / NUMBERS * NUMBERS;
    for (int64_t k = 0; k < whole; k += NUMBERS) {
        decltype(load(a)) weights[M];
        for (int j = 0; j < M; j++) weights[j] = load(a + j * length + k);
        for (int i = 0; i < N; i++) {
            const auto numbers = load(x[i] + k);
            for (int j = 0; j < M; j++) sums[i][j] = add_products(sums[i][j], numbers, weights[j]);
        }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) {
            float total = sum(sums[i][j]);
            for (int64_t k = whole; k < length; k++) total += widen(x[i][k]) * widen(a[j * length + k]);
            h[i * h_stride + j] = total;
        }
}

// sums [N, columns] += h [N, M] times b [M, columns]. Rows of sums are OUTPUTS numbers apart, and rows of h and b
// are `h_stride` and `b_stride` numbers apart.
template <int N, int M>
void multiply_by_b(const float* h, int64_t h_stride, const Stored* b, int64_t b_stride, int columns, float* sums) {
    float factors[N][M];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) factors[i][j] = h[i * h_stride + j];
    int k = 0;
    for (; k + LANES <= columns; k += LANES) {
        Floats weights[M];
        for (int j = 0; j < M; j++) weights[j] = widen(b + j * b_stride + k);
        for (int i = 0; i < N; i++) {
            Floats& to = *(Floats*)(sums + i * OUTPUTS + k);
            Floats total = to;
            for (int j = 0; j < M; j++) total += factors[i][j] * weights[j];
            to = total;
        }
    }
    for (; k < columns; k++)
        for (int i = 0; i < N; i++)
            for (int j = 0; j < M; j++) sums[i * OUTPUTS + k] += factors[i][j] * widen(b[j * b_stride + k]);
}

// h = x A^T of a block, for some rows of A.
template <int N = TOKENS>
void shrink(const Matrix& x, const Adapters& adapters, const Block& block, int64_t begin, int64_t end, int first = 0) {
    const int64_t ranks = adapters.num_parts * adapters.rank, length = adapters.in_features;
    const Stored* a = adapters.a + block.slot * ranks * length;
    for (; first + N <= block.count; first += N) {
        const Stored* rows[N];
        for (int i = 0; i < N; i++) rows[i] = x.row(block.tokens[first + i]);
        int64_t rank = begin;
        for (; rank + RANKS <= end; rank += RANKS)
            multiply_by_a<N, RANKS>(rows, a + rank * length, length, block.h + first * ranks + rank, ranks);
        for (; rank < end; rank++)
            multiply_by_a<N, 1>(rows, a + rank * length, length, block.h + first * ranks + rank, ranks);
    }
    if constexpr (N > 1) shrink<N - 1>(x, adapters, block, begin, end, first);
}

// out = y + h B of a block, for some columns.
template <int N = TOKENS>
void expand(const Adapters& adapters, const Block& block, const Columns& columns, const Matrix& y, const Matrix& out,
            int first = 0) {
    alignas(64) float sums[N * OUTPUTS];
    const int64_t rank = adapters.rank, ranks = adapters.num_parts * rank, stride = adapters.out_features;
    const Stored* b = adapters.b + block.slot * rank * stride + columns.begin;
    for (; first + N <= block.count; first += N) {
        for (int i = 0; i < N; i++) {
            const Stored* from = y.row(block.tokens[first + i]) + columns.begin;
            for (int k = 0; k < columns.count; k++) sums[i * OUTPUTS + k] = widen(from[k]);
        }
        const float* factors = block.h + first * ranks + columns.part * rank;
        int64_t j = 0;
        for (; j + RANKS <= rank; j += RANKS)
            multiply_by_b<N, RANKS>(factors + j, ranks, b + j * stride, stride, columns.count, sums);
        for (; j < rank; j++) multiply_by_b<N, 1>(factors + j, ranks, b + j * stride, stride, columns.count, sums);
        for (int i = 0; i < N; i++) {
            Stored* to = out.row(block.tokens[first + i]) + columns.begin;
            int k = 0;
            for (; k + LANES <= columns.count; k += LANES) narrow(to + k, *(Floats*)(sums + i * OUTPUTS + k));
            for (; k < columns.count; k++) to[k] = narrow(sums[i * OUTPUTS + k]);
        }
    }
    if constexpr (N > 1) expand<N - 1>(adapters, block, columns, y, out, first);
}

// The tokens sorted by slot, -1 first, and where the tokens of each slot begin, and end.
struct Order {
    std::vector<int64_t> tokens, begins;

    Order(const int64_t* slots, int64_t num_tokens, int64_t num_slots) : tokens(num_tokens), begins(num_slots + 2) {
        for (int64_t i = 0; i < num_tokens; i++) begins[slots[i] + 2]++;
        for (int64_t slot = 0; slot <= num_slots; slot++) begins[slot + 1] += begins[slot];
        for (int64_t i = 0; i < num_tokens; i++) tokens[begins[slots[i] + 1]++] = i;
    }
};

void add_adapters(const Matrix& y, const Matrix& x, const Adapters& adapters, const int64_t* slots, int64_t num_tokens,
                  const Matrix& out) {
    const Order order(slots, num_tokens, adapters.num_slots);
    const int64_t num_plain = order.begins[0], ranks = adapters.num_parts * adapters.rank;
    const auto h = std::make_unique<float[]>((num_tokens - num_plain) * ranks);
    std::vector<Block> blocks;
    for (int64_t slot = 0; slot < adapters.num_slots; slot++)
        for (int64_t i = order.begins[slot], end = order.begins[slot + 1]; i < end; i += BLOCK) {
            const int count = std::min<int64_t>(BLOCK, end - i);
            blocks.push_back({slot, &order.tokens[i], count, &h[(i - num_plain) * ranks]});
        }
    std::vector<Columns> columns;
    for (int64_t part = 0, begin = 0; part < adapters.num_parts; part++)
        for (const int64_t end = begin + adapters.sizes[part]; begin < end; begin = std::min(begin + OUTPUTS, end))
            columns.push_back({part, begin, (int)std::min<int64_t>(OUTPUTS, end - begin)});
    const int64_t num_blocks = blocks.size(), num_columns = columns.size();
#pragma omp parallel
    {
#pragma omp for collapse(2) schedule(static)
        for (int64_t i = 0; i < num_blocks; i++)
            for (int64_t rank = 0; rank < ranks; rank += TASK_RANKS)
                shrink(x, adapters, blocks[i], rank, std::min(rank + TASK_RANKS, ranks));
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t i = 0; i < num_blocks; i++)
            for (int64_t j = 0; j < num_columns; j++) expand(adapters, blocks[i], columns[j], y, out);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_plain; i++)
            std::memcpy(out.row(order.tokens[i]), y.row(order.tokens[i]), adapters.out_features * sizeof(Stored));
    }
}

}  // namespace

// The operator nanopage::add_adapters (lora.py), as Inductor calls it. Returns 0, or the code of an error.
extern "C" int aoti_torch_cpu_add_adapters(void* y_tensor, void* x_tensor, void* a_tensor, void* b_tensor,
                                           void* slots_tensor, const int64_t* sizes, int64_t num_parts,
                                           void** out_tensor) {
    int64_t *y_sizes, *y_strides, *x_strides, *a_sizes;
    int32_t dtype;
    void *y, *x, *a, *b, *slots, *out;
    int error = aoti_torch_get_sizes(y_tensor, &y_sizes);
    error = error ? error : aoti_torch_get_strides(y_tensor, &y_strides);
    error = error ? error : aoti_torch_get_strides(x_tensor, &x_strides);
    error = error ? error : aoti_torch_get_sizes(a_tensor, &a_sizes);
    error = error ? error : aoti_torch_get_dtype(y_tensor, &dtype);
    if (error) return error;
    if (y_strides[1] != 1 || x_strides[1] != 1 || a_sizes[1] != num_parts) return 1;
    const int64_t rows = y_sizes[0], out_features = y_sizes[1];
    const int64_t out_sizes[] = {rows, out_features}, strides[] = {out_features, 1};
    error = aoti_torch_empty_strided(2, out_sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, out_tensor);
    error = error ? error : aoti_torch_get_data_ptr(y_tensor, &y);
    error = error ? error : aoti_torch_get_data_ptr(x_tensor, &x);
    error = error ? error : aoti_torch_get_data_ptr(a_tensor, &a);
    error = error ? error : aoti_torch_get_data_ptr(b_tensor, &b);
    error = error ? error : aoti_torch_get_data_ptr(slots_tensor, &slots);
    error = error ? error : aoti_torch_get_data_ptr(*out_tensor, &out);
    if (error) return error;
    const Adapters adapters = {(Stored*)a, (Stored*)b, a_sizes[0], num_parts, a_sizes[2], a_sizes[3], out_features,
                               sizes};
    add_adapters({(Stored*)y, y_strides[0]}, {(Stored*)x, x_strides[0]}, adapters, (const int64_t*)slots, rows,
                 {(Stored*)out, out_features});
    return 0;
}
