# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
# Sets CMAKE_CUDA_COMPILER to what toolkit.py finds, unless the command line has set it.
if(NOT DEFINED CMAKE_CUDA_COMPILER)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/toolkit.py"
    OUTPUT_VARIABLE _nvcc ERROR_VARIABLE _why OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _failed)
  if(_failed)
    message(FATAL_ERROR "${_why}")
  endif()
  set(CMAKE_CUDA_COMPILER "${_nvcc}" CACHE FILEPATH "nvcc")
endif()

# The packages keep their libraries in lib, where nvcc looks in lib64: this is for the compiler's trial links.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH _bin)
cmake_path(GET _bin PARENT_PATH _root)
if(EXISTS "${_root}/lib/libcudart_static.a" AND NOT EXISTS "${_root}/lib64")
  set(ENV{LIBRARY_PATH} "${_root}/lib:$ENV{LIBRARY_PATH}")
endif()
