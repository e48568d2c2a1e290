// How a library is called: one call's words, eight bytes each, in the order of a struct.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef STRETTO_ON_HOST
#include "maps.cuh"
#endif

namespace device {

// Reads a `Call` of that many words and runs it; null, or what went wrong. Static, as libraries are loaded side by side.
template <class Call, int WORDS, class Run>
static const char* called(const int64_t* words, Run run) {
    static_assert(sizeof(Call) == WORDS * 8);
    Call c{};
    std::memcpy(&c, words, sizeof c);
#ifdef STRETTO_ON_HOST
    return run(c);
#else
    try {
        return run(c);
    } catch (CUresult) {
        return "the driver refuses a tensor's map";
    }
#endif
}

}  // namespace device
