// Calls compiled functions one after another, without Python in between (see aot_chain.py).
//
// A handle is the address of a tensor object. A compiled function frees the handles of its inputs.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

// torch/csrc/inductor/aoti_torch/c/shim.h. They return 0, or the code of an error.
extern "C" int aoti_torch_new_tensor_handle(void* handle, void** copied);
extern "C" int aoti_torch_delete_tensor_object(void* handle);
extern "C" int aoti_torch_get_data_ptr(void* handle, void** address);

// kernels/cpu/flash_attention.cpp
struct Step;
extern "C" void attend(const Step& step, const void* q, const void* kv_cache, int64_t num_blocks, int64_t window,
                       void* out);

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
    const void* kv_cache;
    int64_t window;
};

// Call a function with `inputs`, which it frees, followed by copies of `fixed`. Returns 0, or the code of what has
// failed.
extern "C" int call_function(const Function& function, void** inputs, size_t num_inputs, const FixedInputs& fixed,
                             void** output) {
    std::vector<void*> handles(inputs, inputs + num_inputs);
    for (size_t i = 0; i < fixed.count; i++) {
        handles.push_back(nullptr);
        if (const int error = aoti_torch_new_tensor_handle(fixed.handles[i], &handles.back())) return error;
    }
    return function.run(function.container, handles.data(), handles.size(), output, 1, nullptr, nullptr);
}

namespace {

// Call a function with copies of `inputs`.
int call_with_copies(const Function& function, std::initializer_list<void*> inputs, const FixedInputs& fixed,
                     void** output) {
    std::vector<void*> copies;
    for (void* handle : inputs) {
        copies.push_back(nullptr);
        if (const int error = aoti_torch_new_tensor_handle(handle, &copies.back())) return error;
    }
    return call_function(function, copies.data(), copies.size(), fixed, output);
}

}  // namespace

// Run layers up to the attention of the last one. Each layer is `before`, attention and `after`.
//
// attended: the output of each layer's attention is written to it; that of the last one stays there.
// output: the handle of the input of the last layer.
//
// Frees no inputs. Returns 0, or the code of what has failed; temporary tensors may then not be freed.
extern "C" int run_layers(const Function& before, const Function& after, const Layer* layers, size_t num_layers,
                          const Step& step, int64_t num_blocks, void* x, void* cos, void* sin, void* slot_mapping,
                          void* attended, void** output) {
    void *q, *q_address, *attended_address;
    if (const int error = aoti_torch_new_tensor_handle(x, output)) return error;
    if (const int error = aoti_torch_get_data_ptr(attended, &attended_address)) return error;
    for (size_t i = 0; i < num_layers; i++) {
        const Layer& layer = layers[i];
        if (const int error = call_with_copies(before, {*output, cos, sin, slot_mapping}, layer.fixed, &q))
            return error;
        if (const int error = aoti_torch_get_data_ptr(q, &q_address)) return error;
        attend(step, q_address, layer.kv_cache, num_blocks, layer.window, attended_address);
        if (const int error = aoti_torch_delete_tensor_object(q)) return error;
        if (i + 1 == num_layers) break;
        void* x = *output;
        if (const int error = call_with_copies(after, {x, attended}, layer.fixed, output)) return error;
        if (const int error = aoti_torch_delete_tensor_object(x)) return error;
    }
    return 0;
}
