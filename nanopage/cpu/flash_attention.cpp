// Causal attention over a paged KV cache on a CPU: FlashAttention-2 (Dao 2023), and Flash-decoding (Dao et al. 2023)
// for long sequences with one query. pages.py describes the layout of the cache.
//
// The rows of a tile are up to TILE_QUERIES queries of one sequence, each with all heads that share a KV head. For KEYS
// keys at a time, a tile computes scores = q k, weights = 2^(scores - largest) and out += weights v. `largest` is each
// row's largest score so far. When it grows, the earlier sums are scaled down. Nothing that is stored grows with the
// sequence.
//
// Reading K and V limits a query by itself, as in decoding. It reads them directly from the cache, where vectors do not
// cross the ends of pages. Several queries share a copy that is packed for products.
//
// The compiler is given HEAD_DIM (even), NUM_KV_HEADS, GROUP (query heads of a KV head), BLOCK_SIZE, SCALE (of the
// products of q and k), SOFTCAP (0: none; see layers/attention.py), BFLOAT16 (see registers.h), KV_CACHE, the type of K
// and V in the cache: Stored, or, where activations are float32, Bfloat16 or Float16; and BATCH_INVARIANT (1: no splits,
// because their ends depend on the other sequences and on the number of threads. A query then adds up its keys in the
// same order, by itself or beside other queries of its sequence).

#include <omp.h>

#include "registers.h"

namespace {

constexpr int TILE_QUERIES = std::max(1, 96 / GROUP);
constexpr int TILE_ROWS = TILE_QUERIES * GROUP;
constexpr int KEYS = std::max(BLOCK_SIZE, 64 / BLOCK_SIZE * BLOCK_SIZE);
constexpr int NUM_PAGES = KEYS / BLOCK_SIZE;
constexpr int KEY_COLUMNS = round_up(KEYS, LANES);
constexpr int DIMS = round_up(HEAD_DIM, LANES);
constexpr int PIECES = 8;  // per thread, when queries by themselves are divided into pieces
constexpr int64_t PAGE = HEAD_DIM * BLOCK_SIZE;
constexpr int64_t ROW = NUM_KV_HEADS * GROUP * HEAD_DIM;  // elements in a row of q and the output
constexpr float LOWEST = -1e30f;                          // `largest` of a row that has seen no key
constexpr float HIDDEN = -__builtin_inff();               // a score that is masked

struct Sequence {
    const int64_t* blocks;
    int64_t row;  // the row of its first query in q
    int64_t num_queries, num_keys;
};

// What a thread computes at a time, over the keys from `first` to `end`: the rows of a tile, or a query by itself with
// several heads of K and V.
struct Piece {
    Sequence sequence;
    int64_t query;        // the first of the tile
    int head, num_heads;  // of K and V
    int64_t first, end;
    int split, num_splits;  // the index of this split of the keys, and their number
    int64_t partial;        // where the results of the heads' splits begin, [num_heads, num_splits]

    int num_rows() const {
        const int num_queries = std::min<int64_t>(TILE_QUERIES, sequence.num_queries - query);
        return GROUP * num_heads * num_queries;
    }
};

using Cached = KV_CACHE;

struct Layer {
    const Stored* const* q;  // the parts of q
    int64_t part_rows;       // rows of each part but the last
    const Cached *keys, *values;
    Stored* out;
    int64_t window;  // 0: none; below 0: every query sees all keys
};

// The result of one of several splits.
struct Partial {
    float out[GROUP][DIMS], largest[GROUP], total[GROUP];
};

constexpr bool IN_PLACE = BLOCK_SIZE % LANES == 0 && HEAD_DIM % LANES == 0 && GROUP <= MOST_SUMS;

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

// SOFTCAP * tanh(score / SOFTCAP), where score = x * SCALE.
Floats capped(Floats x) {
    const Floats most = Floats{} + 20.0f;  // tanh(10) is 1 in float32
    Floats doubled = x * float(2.0 * SCALE / (SOFTCAP > 0 ? SOFTCAP : 1.0));
    doubled = doubled > most ? most : doubled < -most ? -most : doubled;
    return float(SOFTCAP) * (1.0f - 2.0f / (power_of_two(doubled * 1.44269504f) + 1.0f));
}

// Combine all lanes of x.
template <class Combine>
float reduce(Floats x, Combine combine) {
    for (int distance = LANES / 2; distance; distance /= 2) x = combine(x, __builtin_shuffle(x, LANE ^ distance));
    return x[0];
}

Floats larger(Floats a, Floats b) { return a > b ? a : b; }
Floats sum(Floats a, Floats b) { return a + b; }

const Cached* page_of(const Cached* pages, const Sequence& sequence, int head, int64_t key) {
    return pages + (sequence.blocks[key / BLOCK_SIZE] * NUM_KV_HEADS + head) * PAGE;
}

// Copy `count` keys and values, from the key `first` on, to `scratch`, as `multiply` wants them. The rest are zeros.
void pack(const Layer& layer, const Sequence& sequence, int head, int64_t first, int count, Scratch& scratch) {
    if (count < KEY_COLUMNS) std::memset(scratch.k, 0, sizeof scratch.k);
    for (int begin = 0; begin < count; begin += BLOCK_SIZE) {
        const Cached* page = page_of(layer.keys, sequence, head, first + begin);
        // Fetch the next pages from memory meanwhile: the processor cannot guess where they are.
        const int64_t ahead = std::min(first + begin + KEYS, sequence.num_keys - 1);
        const Cached* next_keys = page_of(layer.keys, sequence, head, ahead);
        const Cached* next_values = page_of(layer.values, sequence, head, ahead);
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
    static const Cached zeros[HEAD_DIM] = {};
    for (int i = 0; i < KEY_COLUMNS; i += PER_WORD) {
        const Cached* rows[PER_WORD];
        for (int j = 0; j < PER_WORD; j++) {
            const int64_t key = first + i + j;
            rows[j] = i + j < count ? page_of(layer.values, sequence, head, key) + key % BLOCK_SIZE * HEAD_DIM : zeros;
        }
        for (int dim = 0; dim < HEAD_DIM; dim++)
            for (int j = 0; j < PER_WORD; j++) scratch.v[i * DIMS + dim * PER_WORD + j] = element(rows[j][dim]);
    }
}

// Turn the scores of `rows` rows, starting at `begin`, into weights. Update `largest`, `total` and the scale of `out`.
// Row i sees the keys between the two numbers of seen(i).
template <class Seen>
void softmax(Scratch& scratch, int begin, int rows, Seen seen) {
    constexpr float scale = 1.44269504 * (SOFTCAP > 0 ? 1.0 : SCALE);  // 2^(x log2(e)) = e^x
    for (int i = begin; i < begin + rows; i++) {
        const auto scores = (Floats*)scratch.scores[i];
        const auto [from, to] = seen(i);
        if (SOFTCAP > 0)
            for (int j = 0; j < KEY_COLUMNS / LANES; j++) scores[j] = capped(scores[j]);
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
        const Floats shift = Floats{} - scratch.largest[i];
        for (int j = 0; j < KEY_COLUMNS / LANES; j++) {
            const Floats weight = power_of_two(fused(scores[j], Floats{} + scale, shift));
            scratch.total[i] += weight;
            store(scratch.weights[i] + j * LANES, weight);
        }
    }
}

// How many vectors of a row are summed at once, if the row has `width` vectors.
constexpr int vectors_at_once(int width) {
    int count = std::clamp(MOST_SUMS / GROUP, 1, width);
    while (width % count) count--;
    return count;
}

Word word_of(const Element* row, int i) { return ((const Word __attribute__((may_alias))*)row)[i]; }

// The scores of a query by itself with `count` keys. Fetches the pages `ahead` from memory meanwhile: the processor
// cannot guess where they are.
void multiply_keys(const Element (*q)[HEAD_DIM], const Cached* const* pages, int count, const Cached* const* ahead,
                   int num_ahead, float (*scores)[KEY_COLUMNS]) {
    constexpr int LINES = PAGE * sizeof(Cached) / 64;
    constexpr int AT_ONCE = vectors_at_once(KEY_COLUMNS / LANES);
    for (int first = 0; first < count; first += AT_ONCE * LANES) {
        const Cached* keys[AT_ONCE];
        for (int j = 0; j < AT_ONCE; j++) {
            const int key = std::min(first + j * LANES, (count - 1) / LANES * LANES);
            keys[j] = pages[key / BLOCK_SIZE] + key % BLOCK_SIZE;
        }
        Floats sums[GROUP][AT_ONCE] = {};
        for (int k = 0; k < HEAD_DIM / PER_WORD; k++) {
            for (int j = 0; first == 0 && j < num_ahead; j++)
                for (int line = k; line < LINES; line += HEAD_DIM / PER_WORD)
                    __builtin_prefetch((const char*)ahead[j] + line * 64, 0, 2);
            for (int j = 0; j < AT_ONCE; j++) {
                const Words key = words_at(keys[j] + k * PER_WORD * BLOCK_SIZE, BLOCK_SIZE);
                for (int i = 0; i < GROUP; i++) sums[i][j] = multiply_add(sums[i][j], word_of(q[i], k), key);
            }
        }
        for (int i = 0; i < GROUP; i++)
            for (int j = 0; j < AT_ONCE; j++) store(scores[i] + first + j * LANES, sums[i][j]);
    }
}

// Add the weighted values of `count` keys to `out`.
void multiply_values(const Element (*weights)[KEY_COLUMNS], const Cached* const* pages, int count, float (*out)[DIMS]) {
    constexpr int AT_ONCE = vectors_at_once(DIMS / LANES);
    for (int dim = 0; dim < HEAD_DIM; dim += AT_ONCE * LANES) {
        Floats sums[GROUP][AT_ONCE];
        for (int i = 0; i < GROUP; i++)
            for (int j = 0; j < AT_ONCE; j++) sums[i][j] = widen(out[i] + dim + j * LANES);
        for (int key = 0; key < count; key += PER_WORD) {
            const Cached* values = pages[key / BLOCK_SIZE] + key % BLOCK_SIZE * HEAD_DIM + dim;
            for (int j = 0; j < AT_ONCE; j++) {
                const Words value = words_at(values + j * LANES, HEAD_DIM);
                for (int i = 0; i < GROUP; i++)
                    sums[i][j] = multiply_add(sums[i][j], word_of(weights[i], key / PER_WORD), value);
            }
        }
        for (int i = 0; i < GROUP; i++)
            for (int j = 0; j < AT_ONCE; j++) store(out[i] + dim + j * LANES, sums[i][j]);
    }
}

// The row of q and of the output that a row of a piece belongs to, and where the piece's head begins in that row.
int64_t query_of(const Piece& piece, int row) {
    return piece.sequence.row + piece.query + row / (GROUP * piece.num_heads);
}
int head_of(const Piece& piece, int row) { return (piece.head * GROUP + row % (GROUP * piece.num_heads)) * HEAD_DIM; }

const Stored* q_of(const Layer& layer, const Piece& piece, int row) {
    const int64_t query = query_of(piece, row);
    return layer.q[query / layer.part_rows] + query % layer.part_rows * ROW + head_of(piece, row);
}

Stored* out_of(const Layer& layer, const Piece& piece, int row) {
    return layer.out + query_of(piece, row) * ROW + head_of(piece, row);
}

// Write a row of the output.
void write(const Layer& layer, const Piece& piece, int row, const float* out, float total) {
    Stored* to = out_of(layer, piece, row);
    for (int i = 0; i < HEAD_DIM; i++) to[i] = narrow(out[i] / total);
}

// Attend to `count` keys, from `first` on, by a query by itself.
void attend_in_place(const Layer& layer, const Piece& piece, int64_t first, int count, Scratch& scratch) {
    const Sequence& sequence = piece.sequence;
    const int from = layer.window > 0 ? std::max<int64_t>(0, sequence.num_keys - layer.window - first) : 0;
    for (int i = 0; i < piece.num_heads; i++) {
        const Cached *keys[NUM_PAGES], *values[NUM_PAGES], *ahead[2 * NUM_PAGES];
        const bool last = i + 1 == piece.num_heads;
        const int64_t next = last ? first + KEYS : first;
        const int next_head = last ? piece.head : piece.head + i + 1;
        int num_ahead = 0;
        for (int j = 0; j < KEYS; j += BLOCK_SIZE) {
            if (j < count) {
                keys[j / BLOCK_SIZE] = page_of(layer.keys, sequence, piece.head + i, first + j);
                values[j / BLOCK_SIZE] = page_of(layer.values, sequence, piece.head + i, first + j);
            }
            if (next + j < piece.end) {
                ahead[num_ahead++] = page_of(layer.keys, sequence, next_head, next + j);
                ahead[num_ahead++] = page_of(layer.values, sequence, next_head, next + j);
            }
        }
        multiply_keys(scratch.q + i * GROUP, keys, count, ahead, num_ahead, scratch.scores + i * GROUP);
        softmax(scratch, i * GROUP, GROUP, [&](int) { return std::pair<int, int>(from, count); });
        multiply_values(scratch.weights + i * GROUP, values, count, scratch.out + i * GROUP);
    }
}

void attend_piece(const Layer& layer, const Piece& piece, Partial* partials, Scratch& scratch) {
    const Sequence& sequence = piece.sequence;
    const int rows = piece.num_rows();
    const int64_t position = sequence.num_keys - sequence.num_queries + piece.query;  // of the first query
    const bool in_place = IN_PLACE && sequence.num_queries == 1;
    for (int i = 0; i < rows; i++) {
        const Stored* q = q_of(layer, piece, i);
        for (int j = 0; j < HEAD_DIM; j++) scratch.q[i][j] = element(q[j]);
        std::memset(scratch.out[i], 0, sizeof scratch.out[i]);
        scratch.largest[i] = LOWEST, scratch.total[i] = Floats{};
    }
    for (int64_t first = piece.first; first < piece.end; first += KEYS) {
        const int count = std::min<int64_t>(KEYS, piece.end - first);
        if (in_place) {
            attend_in_place(layer, piece, first, count, scratch);
            continue;
        }
        pack(layer, sequence, piece.head, first, count, scratch);
        constexpr int SIZE = HEAD_DIM / PER_WORD,
                      LENGTH = KEY_COLUMNS / PER_WORD;  // of rows of q and weights, in words
        multiply<KEY_COLUMNS, false>(scratch.q[0], SIZE, SIZE, scratch.k, scratch.scores[0], rows);
        softmax(scratch, 0, rows, [&](int i) {
            const int64_t end = layer.window < 0 ? count : position + i / GROUP + 1 - first;
            return std::pair<int, int>(layer.window > 0 ? end - layer.window : 0, std::min<int64_t>(end, count));
        });
        multiply<DIMS, true>(scratch.weights[0], LENGTH, LENGTH, scratch.v, scratch.out[0], rows);
    }
    for (int i = 0; i < rows; i++) {
        const float total = reduce(scratch.total[i], sum);
        if (piece.num_splits == 1) {
            write(layer, piece, i, scratch.out[i], total);
            continue;
        }
        Partial& partial = partials[piece.partial + i / GROUP * piece.num_splits + piece.split];
        std::copy(scratch.out[i], scratch.out[i] + DIMS, partial.out[i % GROUP]);
        partial.largest[i % GROUP] = scratch.largest[i], partial.total[i % GROUP] = total;
    }
}

// Combine the splits, of which this piece is the first.
void merge(const Layer& layer, const Piece& piece, const Partial* partials) {
    for (int row = 0; row < piece.num_rows(); row++) {
        const Partial* splits = partials + piece.partial + row / GROUP * piece.num_splits;
        const int i = row % GROUP;
        float largest = LOWEST, total = 0, out[DIMS] = {};
        for (int split = 0; split < piece.num_splits; split++) largest = std::max(largest, splits[split].largest[i]);
        for (int split = 0; split < piece.num_splits; split++) {
            const float factor = power_of_two(Floats{} + (splits[split].largest[i] - largest))[0];
            total += splits[split].total[i] * factor;
            for (int j = 0; j < DIMS; j++) out[j] += splits[split].out[i][j] * factor;
        }
        write(layer, piece, row, out, total);
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

// The pieces of a step, and the results of the pieces that are splits.
struct Work {
    std::vector<Piece> pieces;
    std::vector<Partial> partials;  // none if there are no splits

    Work(const Step& step, int64_t window) {
        const auto first_of = [&](int64_t position) {  // at most the first key that a query sees
            return window > 0 ? std::max<int64_t>(0, position + 1 - window) / KEYS * KEYS : 0;
        };
        // Queries by themselves are divided into pieces with `share` keys or more, counted for each head. The heads of
        // a block are adjacent in memory, so a piece has all heads unless that leaves too few pieces.
        int64_t keys_alone = 0;
        for (int64_t i = 0; i < step.num_sequences; i++)
            if (step.query_lens[i] == 1)
                keys_alone += BATCH_INVARIANT ? KEYS : step.seq_lens[i] - first_of(step.seq_lens[i] - 1);
        const int64_t share = keys_alone * NUM_KV_HEADS / (PIECES * omp_get_num_threads());
        const int64_t most_heads = IN_PLACE ? std::min(NUM_KV_HEADS, TILE_QUERIES) : 1;
        const int heads_at_once = std::clamp<int64_t>(share / KEYS, 1, most_heads);
        const int64_t length_alone = (share / heads_at_once + KEYS) / KEYS * KEYS;
        int64_t row = 0, num_partials = 0;
        for (int64_t i = 0; i < step.num_sequences; row += step.query_lens[i++]) {
            const int64_t* blocks = step.block_tables + i * step.table_width;
            const Sequence sequence{blocks, row, step.query_lens[i], step.seq_lens[i]};
            for (int64_t query = 0; query < sequence.num_queries; query += TILE_QUERIES) {
                const int64_t position = sequence.num_keys - sequence.num_queries + query;
                const int64_t seen = window < 0 ? sequence.num_keys : position + TILE_QUERIES;
                const int64_t end = std::min(seen, sequence.num_keys);
                const int64_t first = first_of(position);
                const bool alone = sequence.num_queries == 1;
                const int64_t length = alone && !BATCH_INVARIANT ? length_alone : end - first;
                const int num_splits = (end - first + length - 1) / length;
                for (int head = 0; head < NUM_KV_HEADS; head += alone ? heads_at_once : 1) {
                    const int num_heads = alone ? std::min(heads_at_once, NUM_KV_HEADS - head) : 1;
                    for (int split = 0; split < num_splits; split++) {
                        const int64_t from = first + split * length, to = std::min(from + length, end);
                        pieces.push_back({sequence, query, head, num_heads, from, to, split, num_splits, num_partials});
                    }
                    if (num_splits > 1) num_partials += num_heads * num_splits;
                }
            }
        }
        partials.resize(num_partials);
    }
};

// All threads of a parallel region call this. It begins when the last thread has called, and returns when all is done.
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
        attend_piece(layer, piece, work->partials.data(), scratch);
    }
    if (num_partials)
#pragma omp for
        for (int64_t i = 0; i < num_pieces; i++) {
            const Piece& piece = work->pieces[i];
            if (piece.num_splits > 1 && piece.split == 0) merge(layer, piece, work->partials.data());
        }
#pragma omp single nowait
    delete work;
}

}  // namespace

// Causal attention of q [T, heads, HEAD_DIM] over a layer's cache [2, num_blocks, NUM_KV_HEADS, HEAD_DIM * BLOCK_SIZE].
// Writes `out`, of q's shape. Slots between a sequence's end and the end of its last block must be finite. A query sees
// the last `window` tokens up to itself, or all of them if `window` is 0. If it is negative, attention is not causal.
//
// q: the addresses of its parts, each of `part_rows` rows except the last, which may have fewer.
//
// In a parallel region, all threads must call this. Elsewhere, this begins one.
extern "C" void attend(const Step& step, const void* const* q, int64_t part_rows, const void* kv_cache,
                       int64_t num_blocks, int64_t window, void* out) {
    const auto keys = (const Cached*)kv_cache;
    const Cached* values = keys + num_blocks * NUM_KV_HEADS * PAGE;
    const Layer layer{(const Stored* const*)q, part_rows, keys, values, (Stored*)out, window};
    if (omp_in_parallel()) {
        attend_together(step, layer);
    } else {
#pragma omp parallel
        attend_together(step, layer);
    }
}
