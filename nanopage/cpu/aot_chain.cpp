// Calls compiled functions one after another, without Python in between (see aot_chain.py).
//
// A handle is the address of a tensor object. A compiled function frees the handles of its inputs.

#include <omp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

// MOST_KINDS is a constant of the compiler's command line (aot_compile.py).

// torch/csrc/inductor/aoti_torch/c/shim.h. They return 0, or the code of an error.
extern "C" int aoti_torch_new_tensor_handle(void* handle, void** copied);
extern "C" int aoti_torch_delete_tensor_object(void* handle);
extern "C" int aoti_torch_get_data_ptr(void* handle, void** address);

// cpu/flash_attention.cpp
struct Step;
extern "C" void attend(const Step& step, const void* const* q, int64_t part_rows, const void* kv_cache,
                       int64_t num_blocks, int64_t window, void* out);

struct Function {
    // AOTInductorModelContainerRunSingleThreaded (torch/csrc/inductor/aoti_runtime/interface.h)
    int (*run)(void* container, void** inputs, size_t num_inputs, void** outputs, size_t num_outputs, void* stream,
               void* proxy_executor);
    void* container;
};

// The handles of inputs that are the same in every call.
struct FixedInputs {
    void** handles;
    size_t count;
};

struct Layer {
    FixedInputs fixed;
    // Functions for each part, because two threads must not call the same function at the same time. A layer with a
    // state has no `before`: `after` is the whole layer.
    const Function *before, *after;
    const void* kv_cache;
    int64_t window;
    int64_t rope;  // the index of a part's rotation
    int64_t kind;  // the index of the step, and of a part's places (layer_kinds.py)
};

// Some rows of a step's activations, as handles.
struct Part {
    void* x;
    // Of each kind of layers: where K and V go; or the states before the step, and where those after it go.
    void *places[MOST_KINDS], *targets[MOST_KINDS];
    void* attended;
    void *cos[2], *sin[2];  // of each rope of the model, which has one or two
    void* adapters;         // the adapter slot of each row; null if no row of the step has an adapter
    void* output;
};

// Call a function with `inputs`, which it frees, followed by copies of `fixed`. Returns 0, or the code of what has
// failed.
extern "C" int call_function(const Function& function, void** inputs, size_t num_inputs, const FixedInputs& fixed,
                             void** outputs, size_t num_outputs) {
    std::vector<void*> handles(inputs, inputs + num_inputs);
    for (size_t i = 0; i < fixed.count; i++) {
        handles.push_back(nullptr);
        if (const int error = aoti_torch_new_tensor_handle(fixed.handles[i], &handles.back())) return error;
    }
    return function.run(function.container, handles.data(), handles.size(), outputs, num_outputs, nullptr, nullptr);
}

namespace {

// Call a function with copies of `inputs`, except null.
template <class Inputs>
int call_with_copies(const Function& function, const Inputs& inputs, const FixedInputs& fixed, void** output) {
    std::vector<void*> copies;
    for (void* handle : inputs) {
        if (!handle) continue;
        copies.push_back(nullptr);
        if (const int error = aoti_torch_new_tensor_handle(handle, &copies.back())) return error;
    }
    return call_function(function, copies.data(), copies.size(), fixed, output, 1);
}

// The part of a layer before attention, for part `j` of the step. Its output is `q`, at `address`.
int call_before(const Layer& layer, int j, const Part& part, void** q, const void** address) {
    const auto inputs = {part.output, part.cos[layer.rope], part.sin[layer.rope], part.places[layer.kind],
                         part.adapters};
    if (const int error = call_with_copies(layer.before[j], inputs, layer.fixed, q)) return error;
    return aoti_torch_get_data_ptr(*q, (void**)address);
}

// The part of a layer after attention, or a layer with a state.
int call_after(const Layer& layer, int j, Part& part) {
    void *x = part.output, *after[] = {x, part.attended, part.adapters};
    void* whole[] = {x, part.places[layer.kind], part.targets[layer.kind]};
    const auto& inputs = layer.before ? after : whole;
    if (const int error = call_with_copies(layer.after[j], inputs, layer.fixed, &part.output)) return error;
    return aoti_torch_delete_tensor_object(x);
}

}  // namespace

// Run layers, up to the attention of the last one if it has one. A layer is `before`, attention and `after`; or, if it
// has a state, `after` alone, and then every sequence of the step has one row.
//
// steps: one for each kind of layers; null for a kind with a state.
// parts: each has `part_rows` rows except the last, which may have fewer. `output` becomes the handle of the input of
//     the last layer, or of its output if it has a state.
// attended: each layer writes the output of its attention here; the last layer's output stays.
//
// Several parts are computed at the same time, each by a single thread. A single part is computed by all threads.
// Frees no inputs. Returns 0, or an error's code; temporary tensors may then not be freed.
extern "C" int run_layers(const Layer* layers, size_t num_layers, const Step* const* steps, int64_t num_blocks,
                          Part* parts, int num_parts, int64_t part_rows, void* attended) {
    std::vector<void*> q(num_parts);
    std::vector<const void*> addresses(num_parts);
    std::atomic<int> error = 0;
    for (int i = 0; i < num_parts; i++)
        if (const int error = aoti_torch_new_tensor_handle(parts[i].x, &parts[i].output)) return error;
    const auto run = [&] {
        for (size_t i = 0; i < num_layers; i++) {
            const Layer& layer = layers[i];
            if (layer.before) {
#pragma omp for schedule(static)
                for (int j = 0; j < num_parts; j++) {
                    if (error) continue;  // from another part, in the previous layer
                    if (const int code = call_before(layer, j, parts[j], &q[j], &addresses[j])) error = code;
                }
                if (error) break;
                const Step& step = *steps[layer.kind];
                attend(step, addresses.data(), part_rows, layer.kv_cache, num_blocks, layer.window, attended);
            }
#pragma omp for schedule(static) nowait  // a thread has the same part in every layer
            for (int j = 0; j < num_parts; j++) {
                if (error) continue;
                int code = 0;
                if (layer.before) code = aoti_torch_delete_tensor_object(q[j]);
                if (!code && !(layer.before && i + 1 == num_layers)) code = call_after(layer, j, parts[j]);
                if (code) error = code;
            }
        }
    };
    if (num_parts == 1) {
        run();  // not in a parallel region: libgomp would start new threads for each nested region
    } else {
#pragma omp parallel num_threads(num_parts)
        {
            omp_set_num_threads(1);  // for what this thread calls
            run();
        }
    }
    return error;
}
