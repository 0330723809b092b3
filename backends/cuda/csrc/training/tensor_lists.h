// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Lists of Python's tensors that look like ones before: an optimizer's step comes again and again. What a tensor is and
// where it lies is read through DLPack's C exchange API (DLPack 1.3), which PyTorch offers since 2.10, in a fifth of
// what it takes from Python.
#pragma once

#include "training/training.h"

#include <pybind11/pybind11.h>

namespace ted {

class TensorLists {
 public:
  // The lists of a call, each a list or tuple of tensors, or None, and the capsule of the tensors' API. Throws
  // invalid_argument where it cannot read them.
  TensorLists(const pybind11::tuple& lists, const pybind11::object& exchange);

  // Whether other lists look like these: classes, lengths, and of every tensor class, dtype, device, shape and strides.
  // If so, `addresses` are theirs.
  bool read(const pybind11::tuple& lists);

  // Of each list; that of None is empty.
  const std::vector<Addresses>& addresses() const { return addresses_; }
  // Of the first list's tensors.
  const Counts& counts() const { return counts_; }
  int64_t elements() const { return elements_; }  // of all of them
  // Codes (dtypes.h), of each list's tensors.
  const std::vector<Dtypes>& dtypes() const { return dtypes_; }

 private:
  struct Kind {
    const void* type;
    int32_t device_type, device, rank;
    uint8_t code, bits;
    size_t sizes;  // where its shape and strides begin in sizes_
  };
  struct Borrowed;
  bool borrow(PyObject* tensor, Borrowed* out) const;

  int (*borrow_)(void*, Borrowed*);
  std::vector<std::pair<const void*, size_t>> lists_;  // classes and lengths
  std::vector<Kind> kinds_;
  std::vector<int64_t> sizes_;
  std::vector<Addresses> addresses_;
  Counts counts_;
  int64_t elements_ = 0;
  std::vector<Dtypes> dtypes_;
};

}  // namespace ted
