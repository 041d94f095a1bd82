// The differences between the torch versions that horon supports (2.11 to 2.15): one macro for each
// set of virtual methods that not all of them have. Nothing else asks for a version.
#pragma once

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11,
              "horon needs torch 2.11 or newer");

// torch 2.14: abort hooks (Hooks.hpp), Work::getTimeout, Backend::Options::clone, gather_single.
#ifdef C10D_BACKEND_HAS_HOOKS
#define HORON_HAS_HOOKS 1
#else
#define HORON_HAS_HOOKS 0
#endif

// torch 2.15: completion hooks (Hooks.hpp), Work::getCompletionKey, Backend::supportsAbortHooks.
#if TORCH_VERSION_MINOR >= 15
#define HORON_HAS_COMPLETION_HOOKS 1
#else
#define HORON_HAS_COMPLETION_HOOKS 0
#endif

// torch 2.14: one-sided windows (Window.hpp, Backend::new_window).
#ifdef C10D_BACKEND_HAS_WINDOW
#define HORON_HAS_WINDOW 1
#else
#define HORON_HAS_WINDOW 0
#endif

// torch 2.15: groups whose members change (Backend::reconfigure).
#ifdef C10D_BACKEND_HAS_RECONFIGURE
#define HORON_HAS_RECONFIGURE 1
#else
#define HORON_HAS_RECONFIGURE 0
#endif
