// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Plans by their packed problem. A plan costs some ten microseconds of the library's heuristics, which calls that come
// again do not pay. Bounded; the least recently used one is dropped.
#pragma once

#include "gemm/plan.h"

#include <functional>
#include <list>
#include <unordered_map>

namespace ted_rocm::gemm {

class PlanCache {
 public:
  struct Statistics {
    int64_t hits, misses, size, capacity, evictions;
  };

  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  // The plan of a problem, made where there is none. make may throw; nothing is kept then.
  std::shared_ptr<Plan> get(const Problem& problem, const std::function<std::shared_ptr<Plan>()>& make);
  void clear();
  Statistics statistics() const;

 private:
  using Entry = std::pair<std::string, std::shared_ptr<Plan>>;

  std::shared_ptr<Plan> find(const std::string& key);

  size_t capacity_;
  int64_t hits_ = 0, misses_ = 0, evictions_ = 0;
  std::list<Entry> entries_;  // the most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> places_;
  mutable std::mutex mutex_;
};

}  // namespace ted_rocm::gemm
