// Maps of tensors for copies of their tiles, made by the driver. A host build has its own.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include "device.cuh"

namespace device {

using MakeMap = decltype(&cuTensorMapEncodeTiled);
inline MakeMap maker() {
    static const MakeMap found = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        return driver == nullptr ? nullptr : reinterpret_cast<MakeMap>(dlsym(driver, "cuTensorMapEncodeTiled"));
    }();
    return found;
}

// A map of [.., n1, n0], of numbers of one byte or of bf16: sizes and tile from the innermost axis on, steps in bytes from the second
// on. Throws what the driver says.
inline Map map_of(const void* from, int each, const uint64_t (&sizes)[5], const uint64_t (&steps)[4], const uint32_t (&tile)[5]) {
    static_assert(sizeof(Map) == sizeof(CUtensorMap));
    const uint32_t ones[5] = {1, 1, 1, 1, 1};
    Map map{};
    const CUtensorMapDataType type = each == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult e = maker()(reinterpret_cast<CUtensorMap*>(&map), type, 5, const_cast<void*>(from), sizes, steps, tile, ones,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (e != CUDA_SUCCESS) throw e;
    return map;
}
inline Map map_of(const void* from, const uint64_t (&sizes)[5], const uint64_t (&steps)[4], const uint32_t (&tile)[5]) {
    return map_of(from, 2, sizes, steps, tile);
}

}  // namespace device
