// The part of torch/csrc/inductor/aoti_torch/c/shim.h that operators use. Functions return 0, or the code of an error.

#pragma once

#include <cstdint>

extern "C" int aoti_torch_get_data_ptr(void* tensor, void** address);
extern "C" int aoti_torch_get_sizes(void* tensor, int64_t** sizes);
extern "C" int aoti_torch_get_strides(void* tensor, int64_t** strides);
extern "C" int aoti_torch_empty_strided(int64_t num_dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, void** tensor);
extern "C" int aoti_torch_get_dtype(void* tensor, int32_t* dtype);
extern "C" int32_t aoti_torch_device_type_cpu();
extern "C" int32_t aoti_torch_dtype_bfloat16();
extern "C" int32_t aoti_torch_dtype_float16();
extern "C" int32_t aoti_torch_dtype_float32();
extern "C" int32_t aoti_torch_dtype_uint8();
