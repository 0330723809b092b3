// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/shared_library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace ted_rocm {

SharedLibrary::SharedLibrary(const char* name, const char* path)
    : name_(name), path_(path), library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
  if (library_ != nullptr) return;
  const char* said = dlerror();
  throw std::runtime_error(name_ + " does not open: " + (said != nullptr ? said : path));
}

void* SharedLibrary::find(const char* function) const {
  void* found = dlsym(library_, function);
  if (found == nullptr) throw std::runtime_error(name_ + " lacks " + function + ", it is too old: " + path_);
  return found;
}

}  // namespace ted_rocm
