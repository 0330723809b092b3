// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Native calls prepared once for each kind of call (te_dispatch_cuda/prepared.py): sizes, codes and options are settled,
// what comes with each call is tensors. A prepared call reads the current stream, allocates the outputs, fills in the
// addresses, calls the native function, and makes the operator's result, in one entry from Python: loading thirty
// arguments and three allocations one by one from Python take as long as a launch.
//
// Functions are offered by `define`, beside their binding. They stay as they are: (device, stream, ...) of integers,
// addresses, flags and floats, which they check themselves, by name, at every call.
#pragma once

#include "common/bindings.h"
#include "common/prepared_word.h"

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

namespace ted {

// A function as prepared calls know it.
struct Preparable {
  // One letter an argument: l address or size, i int, b bool, f float. Empty: any number, each as its constant is.
  std::string kinds;
  void (*call)(const Word* words, size_t count);
};
void offer(const std::string& name, const Preparable& function);

template <class T>
constexpr char kind_of() {
  static_assert(std::is_arithmetic_v<T>, "integers, flags and floats cross the boundary");
  return std::is_same_v<T, bool> ? 'b' : std::is_floating_point_v<T> ? 'f' : sizeof(T) == 8 ? 'l' : 'i';
}

template <class T>
T taken(const Word& word) {
  if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(word.real);
  else
    return static_cast<T>(word.integer);
}

template <auto F>
struct Spread;
template <class... A, void (*F)(A...)>
struct Spread<F> {
  static void call(const Word* words, size_t) { spread(words, std::index_sequence_for<A...>{}); }
  template <size_t... I>
  static void spread(const Word* words, std::index_sequence<I...>) {
    F(taken<A>(words[I])...);
  }
  static std::string kinds() { return {kind_of<A>()...}; }
};

// Binds a function, and offers it to prepared calls.
template <auto F>
void define(pybind11::module_& m, const char* name) {
  m.def(name, F);
  offer(name, {Spread<F>::kinds(), &Spread<F>::call});
}

}  // namespace ted
