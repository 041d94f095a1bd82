// NCCL's API as declarations to be defined here; what they declare is exported.
#pragma once

#include "cuda_api.h"

#pragma GCC visibility push(default)
#include <nccl.h>
#pragma GCC visibility pop
