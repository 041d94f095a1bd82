// CUDA's streams and events under the names that CUDA itself gives to what they point at, so that
// code which only passes them on needs no CUDA header.
#pragma once

struct CUstream_st;
struct CUevent_st;

namespace horon {

using StreamHandle = CUstream_st*;  // cudaStream_t
using EventHandle = CUevent_st*;    // cudaEvent_t

}  // namespace horon
