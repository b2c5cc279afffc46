// Lets each kernel's folder add its functions to the Python module pmoe._cuda, without an edit in other
// files. The folder's bind.cpp, which g++ compiles, has one line:
//
//   static const pmoe::Module module(bind_permute, list_permute_kernels);
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "kernel_info.h"

namespace pmoe {

// The part of pmoe._cuda that one folder adds. All parts form a linked list.
class Module {
 public:
  using Bind = void (*)(pybind11::module_&);
  using List = void (*)(std::vector<KernelInfo>&);

  // bind: adds the folder's functions to pmoe._cuda.
  // list: appends facts about the folder's kernels.
  Module(Bind bind, List list) : bind(bind), list(list), next(first()) { first() = this; }
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // Returns the head of the list; null before the first folder is added. The head is a static variable of a
  // function, because constructors of other files may run before those of this file.
  static const Module*& first() {
    static const Module* head = nullptr;
    return head;
  }

  const Bind bind;
  const List list;
  const Module* const next;
};

}  // namespace pmoe
