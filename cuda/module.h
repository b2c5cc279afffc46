// How a kernel's folder joins pmoe._cuda without an edit elsewhere. For bind.cpp, which g++ compiles:
//
//   static const pmoe::Module joined(bind_permute, list_permute_kernels);
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "kernel_info.h"

namespace pmoe {

class Module {
 public:
  using Bind = void (*)(pybind11::module_&);
  using List = void (*)(std::vector<KernelInfo>&);

  // bind adds functions to pmoe._cuda, list appends the folder's kernels.
  Module(Bind bind, List list) : bind(bind), list(list), next(first()) { first() = this; }
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // The head of a chain, null before the first folder joins: constructors of other files may run earlier.
  static const Module*& first() {
    static const Module* head = nullptr;
    return head;
  }

  const Bind bind;
  const List list;
  const Module* const next;
};

}  // namespace pmoe
