// The zeroth-order step on parameters (MeZO): random directions made where they are used, the previous step's update
// and both perturbations in one pass. Directions are a pure function of (seed, step, tensor, element), so no direction
// is ever stored, and they have the same bits on every instruction set and in every range.
//
// Definition. Element e of a tensor has place (e / 16) mod 4 in Philox4x32-10 (Salmon et al., Parallel Random Numbers:
// As Easy as 1, 2, 3, 2011) under the key (seed mod 2^32, seed / 2^32), at the counter (c mod 2^32, c / 2^32, tensor,
// step) with c = 16 * (e / 64) + e mod 16: so sixteen neighbours are one vector. Its words 0 and 1 give the normals of
// elements 0 to 15 and 16 to 31 of each 64, its words 2 and 3 those of 32 to 47 and 48 to 63, by the transform of Box
// and Muller: of words a and b the first is r cos(t) and the second r sin(t), where
//
//     u = (floor(a / 2) + 1/2) / 2^31,    r = sqrt(-2 ln u),    t = 2 pi b / 2^32
//
// in fp32, each operation rounded to nearest even, as zeroth_order.cpp writes them down. r^2 is accurate to
// 1.2e-7 and 5e-7 of it, the angle to 3e-7, and r reaches to 6.7.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.hpp"

namespace ssdplan {

// The random direction of a tensor in one step.
struct RandomDirection {
    std::uint64_t seed;
    std::uint32_t tensor;
    std::uint32_t step;
};

constexpr std::size_t kNormalGroup = 64;  // elements whose directions are made at once

struct ZerothOrderStep {
    RandomDirection pending;
    float pending_scale;  // p -= pending_scale * z(pending), rounded to the parameters' format; not if 0
    RandomDirection next;
    float eps;  // plus = p + eps * z(next), minus = p - eps * z(next), rounded likewise
};

// `first` is the element of the tensor at which the arrays begin. Without plus and minus, which may be null together,
// only the update is made. `dtype` is fp32 or bf16.
void zeroth_order(void* parameters, void* plus, void* minus, Dtype dtype, std::uint64_t first, std::size_t elements,
                  const ZerothOrderStep& step);

}  // namespace ssdplan
