// What CUDA's public headers need of the toolkit's crt/host_defines.h, which the wheels of CUDA's
// runtime do not carry: the words that mean something to nvcc mean nothing to a C++ compiler.
#pragma once

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __specialization_static
#define __device__
#define __global__
#define __host__
