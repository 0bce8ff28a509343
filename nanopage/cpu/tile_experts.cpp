// Mixtures of experts with weights in tiles (see tile_experts.py): routing, and the products of each expert with the
// rows of its tokens, sorted by expert. Only the weights of chosen experts are read.

#include <memory>

#include "registers.h"
#include "tile_linear.h"

namespace {

constexpr int64_t PARALLEL = 1 << 15;  // from this many numbers on, several threads pay

template <class Number>
std::unique_ptr<Number[]> uninitialized(int64_t size) {
    return std::unique_ptr<Number[]>(new Number[size]);
}

// Call compute(i) for each vector of `size` numbers, which returns its Floats, and store them at `to`. Reads whole
// vectors, even at the end, but writes no more than `size` numbers.
template <class Compute>
void store_all(Stored* to, int64_t size, Compute compute) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) narrow(to + i, compute(i));
    if (i == size) return;
    Stored rest[LANES];
    narrow(rest, compute(i));
    std::copy(rest, rest + (size - i), to + i);
}

// The product of a row of x and a row of the router, rounded as a linear layer rounds it.
float score_of(const Stored* x, const Stored* gate, int64_t hidden_size) {
    Floats sums = {};
    int64_t i = 0;
    for (; i + LANES <= hidden_size; i += LANES) sums += widen(x + i) * widen(gate + i);
    float sum = 0;
    for (; i < hidden_size; i++) sum += widen(x[i]) * widen(gate[i]);
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return widen(narrow(sum));
}

// Choose the experts of a token, the likeliest first, and their weights. If a score is NaN, the weights are NaN, too.
void choose(const Stored* x, int64_t hidden_size, const Stored* gate, int64_t num_experts, int64_t num_chosen,
            bool normalize, int32_t* experts, float* weights) {
    const int64_t padded = round_up(num_experts, LANES);
    std::vector<float> scores(padded, -__builtin_inff());
    for (int64_t i = 0; i < num_experts; i++) scores[i] = score_of(x, gate + i * hidden_size, hidden_size);
    const float most = *std::max_element(scores.begin(), scores.end());
    Floats sums = {};
    for (int64_t i = 0; i < padded; i += LANES) {  // e^x = 2^(x log2(e))
        const Floats power = power_of_two((*(Floats*)&scores[i] - most) * 1.44269504f);
        *(Floats*)&scores[i] = power;
        sums += power;
    }
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    float sum = 0;  // of the chosen ones
    for (int64_t j = 0; j < num_chosen; j++) {
        const auto best = std::max_element(scores.begin(), scores.begin() + num_experts);
        experts[j] = best - scores.begin();
        weights[j] = *best / total;
        sum += weights[j];
        *best = -1;  // less than any score
    }
    for (int64_t j = 0; normalize && j < num_chosen; j++) weights[j] /= sum;
}

// x * sigmoid(x)
Floats silu(Floats x) {
    const Floats power = x * -1.44269504f;
    return x / (1.0f + power_of_two(power > 126.0f ? Floats{} + 126.0f : power));
}

}  // namespace

// The operator nanopage::tile_experts, as Inductor calls it. Returns 0, or the code of an error.
extern "C" int aoti_torch_cpu_tile_experts(void* x_tensor, void* gate_tensor, void* addresses_tensor,
                                           void* gate_up_tiles, void* gate_up_scales, void* down_tiles,
                                           void* down_scales, int64_t intermediate_size, int64_t num_chosen,
                                           int32_t normalize, void** y_tensor) {
    int64_t *x_sizes, *gate_sizes;
    void *x_data, *gate_data, *addresses_data, *y_data;
    Layout gate_up, down;
    int error = aoti_torch_get_sizes(x_tensor, &x_sizes);
    error = error ? error : aoti_torch_get_sizes(gate_tensor, &gate_sizes);
    error = error ? error : layout_of(gate_up_tiles, gate_up_scales, x_sizes[1], &gate_up);
    error = error ? error : layout_of(down_tiles, down_scales, intermediate_size, &down);
    error = error ? error : new_matrix(x_sizes[0], x_sizes[1], x_tensor, y_tensor);
    error = error ? error : aoti_torch_get_data_ptr(x_tensor, &x_data);
    error = error ? error : aoti_torch_get_data_ptr(gate_tensor, &gate_data);
    error = error ? error : aoti_torch_get_data_ptr(addresses_tensor, &addresses_data);
    error = error ? error : aoti_torch_get_data_ptr(*y_tensor, &y_data);
    if (error) return error;
    const int64_t num_tokens = x_sizes[0], hidden_size = x_sizes[1], num_experts = gate_sizes[0];
    const int64_t num_rows = num_tokens * num_chosen;  // a row is a token with one of its experts
    const auto x = (const Stored*)x_data;
    const auto addresses = (const void* const(*)[4])addresses_data;  // of each expert

    std::vector<int32_t> experts(num_rows);
    std::vector<float> weights(num_rows);
#pragma omp parallel for if (num_tokens * num_experts * hidden_size > PARALLEL)
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t first = token * num_chosen;
        choose(x + token * hidden_size, hidden_size, (const Stored*)gate_data, num_experts, num_chosen, normalize,
               &experts[first], &weights[first]);
    }

    // Sort the rows by expert.
    std::vector<int64_t> next(num_experts + 1);  // first the number of rows of the expert before
    for (const int32_t expert : experts) next[expert + 1]++;
    std::vector<Rows> groups, groups_down;
    for (int64_t i = 0; i < num_experts; i++) {
        const int64_t count = next[i + 1];
        next[i + 1] += next[i];
        if (count == 0) continue;
        groups.push_back({next[i], count, addresses[i][0], addresses[i][1]});
        groups_down.push_back({next[i], count, addresses[i][2], addresses[i][3]});
    }
    std::vector<int64_t> places(num_rows);
    for (int64_t i = 0; i < num_rows; i++) places[i] = next[experts[i]]++;

    const int64_t wide = gate_up.num_tiles * TILE, padded = down.num_tiles * TILE;
    const auto inputs = uninitialized<Stored>(num_rows * hidden_size);
    const auto both = uninitialized<Stored>(num_rows * wide);  // gate, then up
    const auto activated = uninitialized<Stored>(num_rows * intermediate_size);
    const auto outputs = uninitialized<Stored>(num_rows * padded);
#pragma omp parallel for if (num_rows * hidden_size > PARALLEL)
    for (int64_t i = 0; i < num_rows; i++)
        std::copy_n(x + i / num_chosen * hidden_size, hidden_size, &inputs[places[i] * hidden_size]);
    if (const int code = multiply_tiles(gate_up, inputs.get(), num_rows, groups, both.get())) return code;
#pragma omp parallel for if (num_rows * intermediate_size > PARALLEL)
    for (int64_t i = 0; i < num_rows; i++) {
        const Stored *gate = &both[i * wide], *up = gate + intermediate_size;
        store_all(&activated[i * intermediate_size], intermediate_size,
                  [&](int64_t j) { return silu(widen(gate + j)) * widen(up + j); });
    }
    if (const int code = multiply_tiles(down, activated.get(), num_rows, groups_down, outputs.get())) return code;
#pragma omp parallel for if (num_rows * hidden_size > PARALLEL)
    for (int64_t token = 0; token < num_tokens; token++)
        store_all((Stored*)y_data + token * hidden_size, hidden_size, [&](int64_t j) {
            Floats sum = {};
            for (int64_t i = token * num_chosen; i < (token + 1) * num_chosen; i++)
                sum += widen(&outputs[places[i] * padded + j]) * weights[i];
            return sum;
        });
    return 0;
}
