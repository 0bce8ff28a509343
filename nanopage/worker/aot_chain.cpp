// Calls compiled functions one after another, without Python in between (see aot_chain.py).
//
// A handle is the address of a tensor object (torch/csrc/inductor/aoti_torch/c/shim.h). A compiled function frees the
// handles of its inputs.

#include <cstddef>
#include <vector>

// aoti_torch_new_tensor_handle: makes another handle of the same tensor.
using Copy = int (*)(void* handle, void** copied);

// AOTInductorModelContainerRunSingleThreaded (torch/csrc/inductor/aoti_runtime/interface.h).
using Run = int (*)(void* container, void** inputs, size_t num_inputs, void** outputs, size_t num_outputs,
                    void* stream, void* proxy_executor);

struct Function {
    Run run;
    void* container;
    void** fixed;  // the handles of its last inputs, which are the same in every call
    size_t num_fixed;
};

// The first input of each function but the first is the output of the one before. The other `inputs` are the same for
// all, and each function's own `fixed` inputs follow. Frees `inputs`. Returns 0, or the code of what has failed; some
// inputs are then not freed.
extern "C" int run_chain(Copy copy, const Function* functions, size_t num_functions, void** inputs, size_t num_inputs,
                         void** output) {
    *output = inputs[0];
    for (size_t i = 0; i < num_functions; i++) {
        const Function& function = functions[i];
        const bool last = i + 1 == num_functions;
        std::vector<void*> handles(num_inputs + function.num_fixed);
        handles[0] = *output;
        for (size_t j = 1; j < handles.size(); j++) {
            void* handle = j < num_inputs ? inputs[j] : function.fixed[j - num_inputs];
            if (last && j < num_inputs)
                handles[j] = handle;
            else if (const int error = copy(handle, &handles[j]))
                return error;
        }
        if (const int error = function.run(function.container, handles.data(), handles.size(), output, 1, nullptr, nullptr))
            return error;
    }
    return 0;
}
