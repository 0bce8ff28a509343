// Causal attention over a paged KV cache on a CPU: FlashAttention-2 (Dao 2023), and Flash-decoding (Dao et al. 2023)
// for long sequences with one query. pages.py describes the layout of the cache.
//
// A tile is up to TILE_QUERIES queries of one sequence, with all heads that share a KV head: its rows. KEYS keys at a
// time, it computes scores = q k, weights = 2^(scores - largest) and out += weights v. `largest` is each row's largest
// score so far. When it grows, the sums up to then are scaled down. Nothing that grows with the sequence is stored.
//
// The compiler is given HEAD_DIM (even), NUM_KV_HEADS, GROUP (query heads of a KV head), BLOCK_SIZE, and
// BFLOAT16 (see registers.h).

#include <omp.h>

#include "registers.h"

namespace {

constexpr int TILE_QUERIES = std::max(1, 96 / GROUP);
constexpr int TILE_ROWS = TILE_QUERIES * GROUP;
constexpr int KEYS = std::max(BLOCK_SIZE, 64 / BLOCK_SIZE * BLOCK_SIZE);
constexpr int KEY_COLUMNS = round_up(KEYS, LANES);
constexpr int DIMS = round_up(HEAD_DIM, LANES);
constexpr int SPLIT_KEYS = 4 * KEYS;  // a query by itself is computed by pieces, so that threads can share them
constexpr int64_t PAGE = HEAD_DIM * BLOCK_SIZE;
constexpr int64_t ROW = NUM_KV_HEADS * GROUP * HEAD_DIM;  // of q and the output
constexpr float LOWEST = -1e30f;                          // `largest` of a row that has seen nothing
constexpr float HIDDEN = -__builtin_inff();               // a score that is masked

struct Sequence {
    const int64_t* blocks;
    int64_t row;  // of its first query in q
    int64_t num_queries, num_keys;
};

// What a thread computes in one go: the rows of a tile over the keys from `first` to `end`.
struct Piece {
    Sequence sequence;
    int64_t query;  // the first of the tile
    int head;       // of K and V
    int64_t first, end;
    int split, num_splits;  // which of the pieces into which the keys are split
};

struct Layer {
    const Stored* const* q;  // its parts
    int64_t part_rows;       // rows of each part but the last
    const Stored *keys, *values;
    Stored* out;
    int64_t window;  // 0: none
};

// The result of one of several splits.
struct Partial {
    float out[GROUP][DIMS], largest[GROUP], total[GROUP];
};

struct Scratch {
    alignas(64) Element q[TILE_ROWS][HEAD_DIM];
    alignas(64) Element k[HEAD_DIM * KEY_COLUMNS];  // [HEAD_DIM / PER_WORD, KEY_COLUMNS] words
    alignas(64) Element v[KEY_COLUMNS * DIMS];      // [KEY_COLUMNS / PER_WORD, DIMS] words
    alignas(64) float scores[TILE_ROWS][KEY_COLUMNS];
    alignas(64) Element weights[TILE_ROWS][KEY_COLUMNS];
    alignas(64) float out[TILE_ROWS][DIMS];
    Floats total[TILE_ROWS];  // to be added up over the lanes
    float largest[TILE_ROWS];
};

// 2^x. 2^fraction is a polynomial, with a relative error below 3e-7.
Floats power_of_two(Floats x) {
    const Floats magic = Floats{} + 0x1.8p23f;  // floats of this size are integers: adding it rounds
    const Floats shifted = x + magic, fraction = x - (shifted - magic);
    Floats power = Floats{} + 1.3298820e-3f;
    for (const float coefficient : {9.6183600e-3f, 5.5503286e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        power = power * fraction + coefficient;
    const Ints exponent = ((Ints)shifted + 127) << 23;
    return x < -126.0f ? Floats{} : power * (Floats)exponent;
}

// Combine all lanes of x.
template <class Combine>
float reduce(Floats x, Combine combine) {
    for (int distance = LANES / 2; distance; distance /= 2) x = combine(x, __builtin_shuffle(x, LANE ^ distance));
    return x[0];
}

Floats larger(Floats a, Floats b) { return a > b ? a : b; }
Floats sum(Floats a, Floats b) { return a + b; }

// Copy `count` keys and values, from the key `first` on, to `scratch`, as `multiply` wants them. The rest are zeros.
void pack(const Layer& layer, const Sequence& sequence, int head, int64_t first, int count, Scratch& scratch) {
    const auto page_of = [&](const Stored* pages, int64_t key) {
        return pages + (sequence.blocks[key / BLOCK_SIZE] * NUM_KV_HEADS + head) * PAGE;
    };
    if (count < KEY_COLUMNS) std::memset(scratch.k, 0, sizeof scratch.k);
    for (int begin = 0; begin < count; begin += BLOCK_SIZE) {
        const Stored* page = page_of(layer.keys, first + begin);
        // Fetch the next pages from memory meanwhile: the processor cannot guess where they are.
        const int64_t ahead = std::min(first + begin + KEYS, sequence.num_keys - 1);
        const Stored *next_keys = page_of(layer.keys, ahead), *next_values = page_of(layer.values, ahead);
        const auto copy = [&](int tokens) {
            for (int i = 0; i < HEAD_DIM; i += PER_WORD) {
                __builtin_prefetch(next_keys + i * BLOCK_SIZE, 0, 2);
                __builtin_prefetch(next_values + i * BLOCK_SIZE, 0, 2);
                for (int j = 0; j < tokens; j++)
                    for (int k = 0; k < PER_WORD; k++)
                        scratch.k[i * KEY_COLUMNS + (begin + j) * PER_WORD + k] =
                            element(page[(i + k) * BLOCK_SIZE + j]);
            }
        };
        if (count - begin >= BLOCK_SIZE)
            copy(BLOCK_SIZE);  // a constant, so that the loop is unrolled
        else
            copy(count - begin);
    }
    static const Stored zeros[HEAD_DIM] = {};
    for (int i = 0; i < KEY_COLUMNS; i += PER_WORD) {
        const Stored* rows[PER_WORD];
        for (int j = 0; j < PER_WORD; j++) {
            const int64_t key = first + i + j;
            rows[j] = i + j < count ? page_of(layer.values, key) + key % BLOCK_SIZE * HEAD_DIM : zeros;
        }
        for (int dim = 0; dim < HEAD_DIM; dim++)
            for (int j = 0; j < PER_WORD; j++) scratch.v[i * DIMS + dim * PER_WORD + j] = element(rows[j][dim]);
    }
}

// Turn the scores of `rows` rows into weights, and update `largest`, `total` and the scale of `out`. Row i sees the
// keys of seen(i), from the first up to the second.
template <class Seen>
void softmax(Scratch& scratch, int rows, Seen seen) {
    const float scale = 1.44269504f / __builtin_sqrtf(HEAD_DIM);  // 2^(x log2(e)) = e^x
    for (int i = 0; i < rows; i++) {
        const auto scores = (Floats*)scratch.scores[i];
        const auto [from, to] = seen(i);
        if (from > 0 || to < KEY_COLUMNS)
            for (int j = 0; j < KEY_COLUMNS / LANES; j++) {
                const Ints key = LANE + j * LANES;
                scores[j] = (key >= from) & (key < to) ? scores[j] : Floats{} + HIDDEN;
            }
        Floats most = scores[0];
        for (int j = 1; j < KEY_COLUMNS / LANES; j++) most = larger(most, scores[j]);
        const float largest = reduce(most, larger) * scale;
        if (largest > scratch.largest[i]) {
            const float factor = power_of_two(Floats{} + (scratch.largest[i] - largest))[0];
            scratch.total[i] *= factor;
            for (int j = 0; j < DIMS / LANES; j++) ((Floats*)scratch.out[i])[j] *= factor;
            scratch.largest[i] = largest;
        }
        for (int j = 0; j < KEY_COLUMNS / LANES; j++) {
            const Floats weights = power_of_two(scores[j] * scale - scratch.largest[i]);
            scratch.total[i] += weights;
            store(scratch.weights[i] + j * LANES, weights);
        }
    }
}

// The row of q and of the output that a row of a piece belongs to, and where its head begins in it.
int64_t query_of(const Piece& piece, int row) { return piece.sequence.row + piece.query + row / GROUP; }
int head_of(const Piece& piece, int row) { return (piece.head * GROUP + row % GROUP) * HEAD_DIM; }

const Stored* q_of(const Layer& layer, const Piece& piece, int row) {
    const int64_t query = query_of(piece, row);
    return layer.q[query / layer.part_rows] + query % layer.part_rows * ROW + head_of(piece, row);
}

Stored* out_of(const Layer& layer, const Piece& piece, int row) {
    return layer.out + query_of(piece, row) * ROW + head_of(piece, row);
}

// Write a row of the output, or its part of `partial` if there are more splits.
void finish(const Layer& layer, const Piece& piece, int row, const float* out, float largest, float total,
            Partial* partial) {
    if (partial) {
        std::copy(out, out + DIMS, partial->out[row]);
        partial->largest[row] = largest, partial->total[row] = total;
    } else {
        Stored* to = out_of(layer, piece, row);
        for (int i = 0; i < HEAD_DIM; i++) to[i] = narrow(out[i] / total);
    }
}

void attend_piece(const Layer& layer, const Piece& piece, Partial* partial, Scratch& scratch) {
    const Sequence& sequence = piece.sequence;
    const int rows = GROUP * std::min<int64_t>(TILE_QUERIES, sequence.num_queries - piece.query);
    const int64_t position = sequence.num_keys - sequence.num_queries + piece.query;  // of the first query
    for (int i = 0; i < rows; i++) {
        const Stored* q = q_of(layer, piece, i);
        for (int j = 0; j < HEAD_DIM; j++) scratch.q[i][j] = element(q[j]);
        std::memset(scratch.out[i], 0, sizeof scratch.out[i]);
        scratch.largest[i] = LOWEST, scratch.total[i] = Floats{};
    }
    for (int64_t first = piece.first; first < piece.end; first += KEYS) {
        const int count = std::min<int64_t>(KEYS, piece.end - first);
        pack(layer, sequence, piece.head, first, count, scratch);
        constexpr int SIZE = HEAD_DIM / PER_WORD,
                      LENGTH = KEY_COLUMNS / PER_WORD;  // of rows of q and weights, in words
        multiply<KEY_COLUMNS, false>(scratch.q[0], SIZE, SIZE, scratch.k, scratch.scores[0], rows);
        softmax(scratch, rows, [&](int i) {
            const int64_t end = position + i / GROUP + 1 - first;
            return std::pair<int, int>(layer.window ? end - layer.window : 0, std::min<int64_t>(end, count));
        });
        multiply<DIMS, true>(scratch.weights[0], LENGTH, LENGTH, scratch.v, scratch.out[0], rows);
    }
    for (int i = 0; i < rows; i++)
        finish(layer, piece, i, scratch.out[i], scratch.largest[i], reduce(scratch.total[i], sum), partial);
}

// Combine the splits of a sequence.
void merge(const Layer& layer, const Piece& piece, const Partial* partials) {
    for (int row = 0; row < GROUP; row++) {
        float largest = LOWEST, total = 0, out[DIMS] = {};
        for (int i = 0; i < piece.num_splits; i++) largest = std::max(largest, partials[i].largest[row]);
        for (int i = 0; i < piece.num_splits; i++) {
            const float factor = power_of_two(Floats{} + (partials[i].largest[row] - largest))[0];
            total += partials[i].total[row] * factor;
            for (int j = 0; j < DIMS; j++) out[j] += partials[i].out[row][j] * factor;
        }
        finish(layer, piece, row, out, largest, total, nullptr);
    }
}

}  // namespace

// What attention needs to know of a step. Its sequences follow each other in q.
struct Step {
    int64_t num_sequences;
    const int64_t* block_tables;  // [num_sequences, table_width]
    int64_t table_width;
    const int64_t *query_lens, *seq_lens;
};

namespace {

// The pieces of a step, and the results of those that are splits.
struct Work {
    std::vector<Piece> pieces;
    std::vector<Partial> partials;  // none if there are no splits

    Work(const Step& step, int64_t window) {
        bool any_split = false;
        int64_t row = 0;
        for (int64_t i = 0; i < step.num_sequences; row += step.query_lens[i++]) {
            const int64_t* blocks = step.block_tables + i * step.table_width;
            const Sequence sequence{blocks, row, step.query_lens[i], step.seq_lens[i]};
            for (int64_t query = 0; query < sequence.num_queries; query += TILE_QUERIES) {
                const int64_t position = sequence.num_keys - sequence.num_queries + query;
                const int64_t end = std::min(position + TILE_QUERIES, sequence.num_keys);
                const int64_t first = window ? std::max<int64_t>(0, position + 1 - window) / KEYS * KEYS : 0;
                const int64_t length = sequence.num_queries == 1 ? SPLIT_KEYS : end - first;
                const int num_splits = (end - first + length - 1) / length;
                any_split |= num_splits > 1;
                for (int head = 0; head < NUM_KV_HEADS; head++)
                    for (int split = 0; split < num_splits; split++) {
                        const int64_t from = first + split * length, to = std::min(from + length, end);
                        pieces.push_back({sequence, query, head, from, to, split, num_splits});
                    }
            }
        }
        if (any_split) partials.resize(pieces.size());
    }
};

// All threads of a parallel region call this. It begins when the last one has, and returns when all is done.
void attend_together(const Step& step, const Layer& layer) {
    Work* work;
#pragma omp single copyprivate(work)
    work = new Work(step, layer.window);
    const int64_t num_pieces = work->pieces.size(), num_partials = work->partials.size();
    static thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
    // The last tiles of a prompt see the most keys: begin with them.
    for (int64_t i = num_pieces - 1; i >= 0; i--) {
        const Piece& piece = work->pieces[i];
        attend_piece(layer, piece, piece.num_splits > 1 ? &work->partials[i] : nullptr, scratch);
    }
    if (num_partials)
#pragma omp for
        for (int64_t i = 0; i < num_partials; i++) {
            const Piece& piece = work->pieces[i];
            if (piece.num_splits > 1 && piece.split == 0) merge(layer, piece, &work->partials[i]);
        }
#pragma omp single nowait
    delete work;
}

}  // namespace

// Causal attention of q [T, heads, HEAD_DIM] over a layer's cache [2, num_blocks, NUM_KV_HEADS, HEAD_DIM * BLOCK_SIZE].
// Writes `out`, of q's shape. A query sees the last `window` tokens up to itself, or all of them if `window` is 0.
//
// q: the addresses of its parts, each of `part_rows` rows except the last, which may have fewer.
//
// In a parallel region, all threads must call this. Elsewhere, this begins one.
extern "C" void attend(const Step& step, const void* const* q, int64_t part_rows, const void* kv_cache,
                       int64_t num_blocks, int64_t window, void* out) {
    const auto keys = (const Stored*)kv_cache;
    const Stored* values = keys + num_blocks * NUM_KV_HEADS * PAGE;
    const Layer layer{(const Stored* const*)q, part_rows, keys, values, (Stored*)out, window};
    if (omp_in_parallel()) {
        attend_together(step, layer);
    } else {
#pragma omp parallel
        attend_together(step, layer);
    }
}
