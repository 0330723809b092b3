// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "gemm/plan_cache.h"

namespace ted_rocm::gemm {

std::shared_ptr<Plan> PlanCache::find(const std::string& key) {
  const auto place = places_.find(key);
  if (place == places_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, place->second);
  return place->second->second;
}

std::shared_ptr<Plan> PlanCache::get(const Problem& problem, const std::function<std::shared_ptr<Plan>()>& make) {
  const std::string key = problem.packed();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::shared_ptr<Plan> known = find(key)) {
      ++hits_;
      return known;
    }
    ++misses_;
  }
  // Without the lock: making a plan may run Python, which may let another thread in here.
  const std::shared_ptr<Plan> made = make();
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::shared_ptr<Plan> known = find(key)) return known;
  entries_.emplace_front(key, made);
  places_[key] = entries_.begin();
  if (entries_.size() > capacity_) {
    places_.erase(entries_.back().first);
    entries_.pop_back();
    ++evictions_;
  }
  return made;
}

void PlanCache::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  places_.clear();
  entries_.clear();
  hits_ = misses_ = evictions_ = 0;
}

PlanCache::Statistics PlanCache::statistics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {hits_, misses_, static_cast<int64_t>(entries_.size()), static_cast<int64_t>(capacity_), evictions_};
}

}  // namespace ted_rocm::gemm
