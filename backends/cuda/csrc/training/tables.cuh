// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Lists of tensors as a kernel parameter: addresses and sizes travel with the launch, so nothing is copied to the
// device, and a captured graph holds them. A block does one chunk of one tensor.
#pragma once

#include "common/queue.h"
#include "common/scalar.cuh"

#include <string>
#include <vector>

namespace ted {

// Lists: how many tensors an entry has. Capacity: entries of one launch; parameters may take 32764 bytes (CUDA C++
// Programming Guide, "Kernel parameters"), and a short list is better off with few.
template <int Lists, int Capacity>
struct Table {
  void* address[Lists][Capacity];
  int64_t count[Capacity];
  int32_t first_block[Capacity];
  uint8_t dtype[2][Capacity];
  int32_t entries;
  int32_t blocks;
};

constexpr int kFew = 32;

// A chunk of one entry.
struct Piece {
  int entry;
  int64_t begin;
  int64_t count;
};

template <int64_t Chunk, class T>
__device__ __forceinline__ Piece piece_of(const T& table, int block) {
  int low = 0, high = table.entries;  // first_block[low] <= block < first_block[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_block[middle] <= block)
      low = middle;
    else
      high = middle;
  }
  const int64_t begin = static_cast<int64_t>(block - table.first_block[low]) * Chunk;
  const int64_t left = table.count[low] - begin;
  return {low, begin, left < Chunk ? left : Chunk};
}

// Splits lists into tables of up to Capacity entries and calls launch(table) for each; empty tensors are left out.
template <int64_t Chunk, int Lists, int Capacity, class F>
void for_tables(const std::vector<const std::vector<uintptr_t>*>& lists, const std::vector<int64_t>& counts,
                const std::vector<const std::vector<int>*>& dtypes, F&& launch) {
  Table<Lists, Capacity> table;
  table.entries = table.blocks = 0;
  auto flush = [&] {
    if (table.entries > 0) launch(table);
    table.entries = table.blocks = 0;
  };
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    const int64_t blocks = ceil_div(counts[i], Chunk);
    if (table.entries == Capacity || table.blocks + blocks > INT32_MAX) flush();
    for (size_t k = 0; k < static_cast<size_t>(Lists); ++k)
      table.address[k][table.entries] = lists[k]->empty() ? nullptr : reinterpret_cast<void*>((*lists[k])[i]);
    for (size_t k = 0; k < dtypes.size(); ++k)
      table.dtype[k][table.entries] = static_cast<uint8_t>((*dtypes[k])[i]);
    table.count[table.entries] = counts[i];
    table.first_block[table.entries++] = table.blocks;
    table.blocks += static_cast<int32_t>(grid_x("tensors", blocks));
  }
  flush();
}

// Checks one list against the counts; `element` gives the bytes of an element of entry i.
template <class F>
void require_entries(const char* name, const std::vector<uintptr_t>& list, const std::vector<int64_t>& counts,
                     F&& element) {
  if (list.size() != counts.size())
    throw std::invalid_argument(std::string(name) + ": got " + std::to_string(list.size()) + " tensors, expected " +
                                std::to_string(counts.size()));
  for (size_t i = 0; i < list.size(); ++i) {
    if (counts[i] > 0 && list[i] != 0 && list[i] % static_cast<uintptr_t>(element(i)) == 0) continue;
    const std::string entry = std::string(name) + "[" + std::to_string(i) + "]";  // made for the message only
    require_size(entry.c_str(), counts[i]);
    require_pointer(entry.c_str(), reinterpret_cast<void*>(list[i]), counts[i], element(i));
  }
}

inline void require_list(const char* name, const std::vector<uintptr_t>& list, const std::vector<int64_t>& counts,
                         int dtype) {
  require_entries(name, list, counts, [&](size_t) { return size_of(dtype); });
}

inline void require_list(const char* name, const std::vector<uintptr_t>& list, const std::vector<int64_t>& counts,
                         const std::vector<int>& dtypes) {
  if (dtypes.size() != list.size())
    throw std::invalid_argument(std::string(name) + ": got " + std::to_string(dtypes.size()) + " dtypes, expected " +
                                std::to_string(list.size()));
  require_entries(name, list, counts, [&](size_t i) { return size_of(dtypes[i]); });
}

}  // namespace ted
