// Marks functions that kernels and the host's tests both run. Plain C++ compilers see plain inline.
#pragma once

#if defined(__CUDACC__)
#define HORON_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HORON_HOST_DEVICE inline
#endif
