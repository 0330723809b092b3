// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/workspace.h"

#include "common/queue.h"

#include <algorithm>
#include <vector>

namespace py = pybind11;

namespace ted {

namespace {

// Less is not worth replacing later.
constexpr int64_t kLeast = 256 << 10;

struct Kept {
  int device;
  uintptr_t stream;
  int64_t bytes, address;
  py::object tensor;
};

// Never destroyed: the interpreter is gone by then.
std::vector<Kept>& all() {
  static auto* const list = new std::vector<Kept>;
  return *list;
}

int64_t rounded(int64_t bytes) {
  int64_t size = kLeast;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

PyObject* kept_workspace(int device, uintptr_t stream, int64_t bytes, PyObject* empty, PyObject* torch_device,
                         int64_t& address) {
  std::vector<Kept>& list = all();
  const auto same = [&](const Kept& kept) { return kept.stream == stream && kept.device == device; };
  const auto known = std::find_if(list.begin(), list.end(), same);
  if (known != list.end() && known->bytes >= bytes) {
    address = known->address;
    return known->tensor.inc_ref().ptr();
  }
  // Freed before there is another, and off the list before Python runs.
  if (known != list.end()) {
    const py::object smaller = std::move(known->tensor);
    list.erase(known);
  } else if (list.size() >= kMostStreams) {
    release_workspaces();
  }
  try {
    const int64_t size = rounded(bytes);
    const py::object uint8 = py::module_::import("torch").attr("uint8");
    Kept made{device, stream, size, 0, py::handle(empty)("workspace", py::make_tuple(size), uint8, py::handle(torch_device))};
    made.address = static_cast<int64_t>(made.tensor.attr("data_ptr")().cast<uint64_t>());
    address = made.address;
    list.push_back(made);
    return made.tensor.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

bool capturing(uintptr_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(pointer<CUstream_st>(stream), &status);
  if (error == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // what is wrong with the stream is told by the launch
  return error == cudaErrorStreamCaptureImplicit;
}

int64_t release_workspaces() {
  std::vector<Kept> freed;
  freed.swap(all());
  int64_t bytes = 0;
  for (const Kept& kept : freed) bytes += kept.bytes;
  return bytes;
}

}  // namespace ted
