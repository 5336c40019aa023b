// The part of the DLPack 0.8 ABI that a one-dimensional CPU array needs (https://dmlc.github.io/dlpack): torch and
// numpy take such an array without a copy.
#pragma once

#include <cstdint>

namespace ssdplan::dlpack {

struct Device {
    std::int32_t device_type;
    std::int32_t device_id;
};

struct DataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct ManagedTensor {
    Tensor tensor;
    void* manager_context;
    void (*deleter)(ManagedTensor* self);
};

inline constexpr std::int32_t kCpu = 1;
inline constexpr std::uint8_t kUnsigned = 1;

}  // namespace ssdplan::dlpack
