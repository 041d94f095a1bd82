# Decides whether the GPU parts are built, and how.
#
#   HORON_CUDA                 ON or OFF when this file is done
#   HORON_CUDA_MAJOR           13 for toolkit 13.0
#   horon_cuda_runtime         target: headers of CUDA and NCCL, libcudart and libnccl as torch loads them
#
# Which headers: the toolkit's come first, since its kernels are compiled against its own CCCL, which checks the exact
# version. Torch's wheels bring those of a newer minor version, and some (cusparse.h) that a small toolkit lacks; they are
# searched last of all (-idirafter). NCCL is always the wheel's: two of them in one process do not share communicators.
if(NOT HORON_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "HORON_CUDA is '${HORON_CUDA}'; expected AUTO, ON or OFF.")
endif()

if(HORON_CUDA STREQUAL "AUTO")
  set(HORON_CUDA OFF)
  if(HORON_NCCL_INCLUDE_DIR)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(HORON_CUDA ON)
    endif()
  endif()
endif()
if(NOT HORON_CUDA)
  message(STATUS "GPU parts: off")
  return()
endif()

foreach(variable IN ITEMS HORON_NCCL_INCLUDE_DIR HORON_NCCL_LIBRARY)
  if(NOT EXISTS "${${variable}}")
    message(FATAL_ERROR "${variable} is '${${variable}}', which does not exist. setup.py sets it where torch is a CUDA "
      "build; for a build without GPU parts use -DHORON_CUDA=OFF.")
  endif()
endforeach()

# Ours is the shared runtime, the library that torch loads: one state of CUDA in the process.
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
set(CMAKE_CUDA_ARCHITECTURES "${HORON_CUDA_ARCHITECTURES}")
enable_language(CUDA)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
# CMake before 3.26 does not know that nvcc has C++20 from version 12 on.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_EXTENSIONS OFF)
string(APPEND CMAKE_CUDA_FLAGS " -Xcompiler -Wall,-Wextra")
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG -lineinfo")
string(REGEX MATCH "^[0-9]+" HORON_CUDA_MAJOR "${CMAKE_CUDA_COMPILER_VERSION}")
message(STATUS "GPU parts: on, CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")

find_library(HORON_CUDART_LIBRARY cudart PATHS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} NO_DEFAULT_PATH)
if(NOT HORON_CUDART_LIBRARY)
  message(FATAL_ERROR "libcudart.so is in none of: ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES}. Install the toolkit's "
    "cuda-cudart-dev, or build without GPU parts: -DHORON_CUDA=OFF.")
endif()

add_library(horon_cuda_runtime INTERFACE)
# CXX only: nvcc knows its own, and would put them behind if they were named.
target_include_directories(horon_cuda_runtime SYSTEM INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}>" "${HORON_NCCL_INCLUDE_DIR}")
foreach(folder IN LISTS HORON_CUDA_EXTRA_INCLUDE_DIRS)
  target_compile_options(horon_cuda_runtime INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter ${folder}>"
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xcompiler -idirafter,${folder}>")
endforeach()
target_link_libraries(horon_cuda_runtime INTERFACE "${HORON_CUDART_LIBRARY}" "${HORON_NCCL_LIBRARY}")
