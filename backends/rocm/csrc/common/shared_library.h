// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Functions of a library that is opened at run time.
#pragma once

#include <string>

namespace ted_rocm {

class SharedLibrary {
 public:
  // Opens the file. Throws std::runtime_error with the linker's message.
  SharedLibrary(const char* name, const char* path);

  // Throws std::runtime_error that names the function which the library lacks.
  template <class F>
  void resolve(const char* function, F& target) const {
    target = reinterpret_cast<F>(find(function));
  }

 private:
  void* find(const char* function) const;

  std::string name_, path_;
  void* library_;
};

}  // namespace ted_rocm
