// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "training/tensor_lists.h"

#include "common/dtypes.h"

#include <cstring>
#include <stdexcept>

namespace py = pybind11;

namespace ted {

// A tensor as DLPack tells of it (DLTensor); shape and strides are the tensor's own.
struct TensorLists::Borrowed {
  void* data;
  int32_t device_type, device, rank;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t offset;
};

namespace {

constexpr uint32_t kMajor = 1;               // of DLPack's versions, which keep the layout
constexpr uint8_t kFloat = 2, kBFloat = 4;   // DLPack's codes of types

struct Header {
  uint32_t major, minor;
  Header* previous;
};

template <class Borrow>
struct Exchange {
  Header header;
  void* others[3];  // allocate; own; give back
  Borrow borrow;
};

int dtype_of(uint8_t code, uint8_t bits) {
  if (code == kFloat && bits == 32) return kFloat32;
  if (code == kBFloat && bits == 16) return kBFloat16;
  if (code == kFloat && bits == 16) return kFloat16;
  throw std::invalid_argument("lists of tensors: a dtype that is none of fp32, bf16 and fp16");
}

// Items of a list or tuple, none of None.
struct Items {
  PyObject** first = nullptr;
  size_t count = 0;
  const void* type;

  explicit Items(PyObject* list) : type(Py_TYPE(list)) {
    if (PyList_CheckExact(list) || PyTuple_CheckExact(list))
      first = PySequence_Fast_ITEMS(list), count = static_cast<size_t>(PySequence_Fast_GET_SIZE(list));
    else if (list != Py_None)
      type = nullptr;
  }
};

}  // namespace

bool TensorLists::borrow(PyObject* tensor, Borrowed* out) const {
  if (borrow_(tensor, out) == 0) return out->rank == 0 || out->strides != nullptr;
  PyErr_Clear();
  return false;
}

TensorLists::TensorLists(const py::tuple& lists, const py::object& exchange) : borrow_(nullptr) {
  auto* header = static_cast<Header*>(PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api"));
  if (header == nullptr) throw py::error_already_set();
  while (header != nullptr && header->major != kMajor) header = header->previous;
  if (header != nullptr) borrow_ = reinterpret_cast<Exchange<decltype(borrow_)>*>(header)->borrow;
  if (borrow_ == nullptr) throw std::invalid_argument("lists of tensors: no exchange API of DLPack 1");
  for (py::handle list : lists) {
    const Items items(list.ptr());
    if (items.type == nullptr) throw std::invalid_argument("lists of tensors: neither list nor tuple nor None");
    const bool first = lists_.empty();
    lists_.emplace_back(items.type, items.count);
    addresses_.emplace_back(items.count);
    dtypes_.emplace_back();
    for (size_t i = 0; i < items.count; ++i) {
      Borrowed x;
      if (!borrow(items.first[i], &x)) throw std::invalid_argument("lists of tensors: one that DLPack cannot tell of");
      kinds_.push_back({Py_TYPE(items.first[i]), x.device_type, x.device, x.rank, x.code, x.bits, sizes_.size()});
      sizes_.insert(sizes_.end(), x.shape, x.shape + x.rank);
      sizes_.insert(sizes_.end(), x.strides, x.strides + x.rank);
      dtypes_.back().push_back(dtype_of(x.code, x.bits));
      if (!first) continue;
      int64_t count = 1;
      for (int d = 0; d < x.rank; ++d) count *= x.shape[d];
      counts_.push_back(count);
      elements_ += count;
    }
  }
}

bool TensorLists::read(const py::tuple& lists) {
  if (lists.size() != lists_.size()) return false;
  const Kind* kind = kinds_.data();
  for (size_t k = 0; k < lists_.size(); ++k) {
    const Items items(PyTuple_GET_ITEM(lists.ptr(), k));
    if (items.type != lists_[k].first || items.count != lists_[k].second) return false;
    for (size_t i = 0; i < items.count; ++i, ++kind) {
      Borrowed x;
      if (Py_TYPE(items.first[i]) != kind->type || !borrow(items.first[i], &x)) return false;
      const size_t bytes = sizeof(int64_t) * static_cast<size_t>(kind->rank);
      const int64_t* sizes = sizes_.data() + kind->sizes;
      if (x.rank != kind->rank || x.code != kind->code || x.bits != kind->bits || x.lanes != 1 ||
          x.device_type != kind->device_type || x.device != kind->device || std::memcmp(x.shape, sizes, bytes) != 0 ||
          std::memcmp(x.strides, sizes + kind->rank, bytes) != 0)
        return false;
      addresses_[k][i] = reinterpret_cast<uintptr_t>(x.data) + x.offset;
    }
  }
  return true;
}

}  // namespace ted
