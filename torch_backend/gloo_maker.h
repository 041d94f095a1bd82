// What makes Gloo groups: Python, which has torch's.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <functional>

#include "compat.h"

namespace horon::torch_backend {

// Makes a Gloo group over a store, with a rank and a number of ranks, which meet within the time,
// as do those of its operations that bring no other. Called without the GIL.
using GlooMaker = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>&, int rank, int n_ranks, std::chrono::milliseconds)>;

GlooMaker wrap_gloo_maker(pybind11::function function);

}  // namespace horon::torch_backend
