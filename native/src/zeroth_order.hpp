// The zeroth-order step on parameters (MeZO): random directions made where they are used, the updates that are pending
// and both perturbations in one pass. Directions are a pure function of (seed, step, direction, tensor, element), so no
// direction is ever stored, and they have the same bits on every instruction set and in every range.
//
// Definition. Element e of a tensor, below 2^50, has place (e / 16) mod 4 in Philox4x32-10 (Salmon et al., Parallel
// Random Numbers: As Easy as 1, 2, 3, 2011) under the key (seed mod 2^32, seed / 2^32), at the counter (c mod 2^32,
// c / 2^32 + 2^16 direction, tensor, step) with c = 16 * (e / 64) + e mod 16: so sixteen neighbours are one vector, and
// c / 2^32 is below 2^16. Its words 0 and 1 give the normals of
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

constexpr std::size_t kNormalGroup = 64;  // elements whose directions are made at once
constexpr std::uint64_t kMostElements = std::uint64_t{1} << 50;
constexpr std::uint32_t kMostDirections = 1U << 16;

// One of the directions of a step.
struct RandomDirection {
    std::uint32_t step;
    std::uint32_t direction;
};

// p = keep * p - scale * z, rounded to the parameters' format.
struct ZerothOrderUpdate {
    RandomDirection direction;
    float scale;
    float keep;  // 1 but where weights decay
};

struct ZerothOrderPass {
    std::uint64_t seed;
    std::uint32_t tensor;
    const ZerothOrderUpdate* pending;  // made one after the other
    std::size_t updates;
    RandomDirection next;
    float eps;  // plus = p + eps * z(next), minus = p - eps * z(next), of p rounded to the format of these, and rounded
};

struct ZerothOrderPlaces {
    void* parameters;
    Dtype parameters_dtype;
    void* plus;  // null where it is not wanted, as minus
    void* minus;
    Dtype dtype;          // of both
    std::uint64_t first;  // the element of the tensor at which all begin
    std::size_t elements;
};

// The parameters are fp32 masters, or of the format of plus and minus.
void zeroth_order(const ZerothOrderPlaces& places, const ZerothOrderPass& pass);

}  // namespace ssdplan
