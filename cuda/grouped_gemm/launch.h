// Launches the grouped products. This code uses no PyTorch, only pointers, sizes and a stream.
#pragma once
#include <cuda.h>

#include <cstdint>
#include <string>

#include "problem.h"

namespace pmoe {

enum class Element : int { kBf16, kFp16 };

// Selects a compiled kernel: the values that are template arguments of the kernels.
struct GroupedGemm {
  Element element;
  Form form;
  Epilogue epilogue;
  Activation activation;    // kNone for the epilogue kPlain
  int cluster = 1;          // number of blocks that share B, 1 or 2; only Hopper's path takes 2
  bool in_turns = false;    // two warpgroups multiply in turns (hopper_turns.cuh); cluster is then 1
  bool boxed = false;       // both warpgroups multiply one tile, stored as boxes (hopper_boxes.cuh)
  bool b_gathered = false;  // kWeight, boxed, cluster 1: the rows of B are gathered from tokens
};

// Which operand the two blocks of a cluster share:
//
// kByRule: the operand that best_sharing() in sharing.h chooses.
// kNothing: no operand; there are no clusters.
// kB: operand B; the tiles of the two blocks lie one below the other.
// kA: operand A; the tiles of the two blocks lie side by side.
enum class Sharing : int { kByRule, kNothing, kB, kA };

// One of the two implementations of the product: with Hopper's instructions, or with those of sm_80.
//
// name: "sm_90a" or "sm_80".
// function: returns the kernel, for cudaFuncGetAttributes.
// launch: launches on the current device. a_rows and b_rows are the numbers of rows of A and B in memory.
//     b_rows is only read in form kWeight. Throws std::runtime_error if CUDA refuses the launch.
// threads: number of threads of a block.
// shared_bytes: returns the bytes of shared memory of a block.
struct GroupedGemmPath {
  const char* name;
  const void* (*function)(const GroupedGemm&);
  void (*launch)(const GroupedGemm&, const Problem&, int64_t a_rows, int64_t b_rows, int blocks,
                 void* stream);
  int threads;
  int (*shared_bytes)(const GroupedGemm&);
};

extern const GroupedGemmPath hopper_path, ampere_path;

// Calls visit(which) for every kernel that computes products in turns.
template <class Visit>
void for_each_in_turns(Visit visit) {
  for (Element element : {Element::kBf16, Element::kFp16}) {
    for (Form form : {Form::kForward, Form::kInput})
      visit(GroupedGemm{element, form, Epilogue::kPlain, Activation::kNone, 1, true});
    visit(GroupedGemm{element, Form::kForward, Epilogue::kHidden, Activation::kSwiglu, 1, true});
    visit(GroupedGemm{element, Form::kInput, Epilogue::kHiddenGradient, Activation::kSwiglu, 1, true});
  }
}

// Calls visit(which) for every kernel whose two warpgroups multiply one tile, and which stores the tile as
// boxes.
template <class Visit>
void for_each_boxed(Visit visit) {
  for (Element element : {Element::kBf16, Element::kFp16}) {
    for (Form form : {Form::kForward, Form::kInput, Form::kWeight})
      visit(GroupedGemm{element, form, Epilogue::kPlain, Activation::kNone, 1, false, true});
    visit(GroupedGemm{element, Form::kWeight, Epilogue::kPlain, Activation::kNone, 2, false, true});
    visit(GroupedGemm{element, Form::kWeight, Epilogue::kPlain, Activation::kNone, 1, false, true, true});
    visit(GroupedGemm{element, Form::kForward, Epilogue::kHidden, Activation::kSwiglu, 1, false, true});
  }
}

// Returns the kernel's name, which users and error messages show.
std::string name_of(const GroupedGemm&, const GroupedGemmPath&);

// Makes the tensor maps by which the kernels for Hopper load their operands. Throws std::runtime_error if the
// driver refuses a map.
//
// a_rows, b_rows: numbers of rows of A and B in memory. b_rows is read only for weight gradients. In other
//     products, B is the experts' weights.
// b_map: null if the rows of B are gathered. No map of B is made then.
// b_lines: number of rows in a box of B in form kForward (forward_lines() in hopper_block.cuh).
void encode_maps(Element, Form, const Problem&, int64_t a_rows, int64_t b_rows, CUtensorMap* a_map,
                 CUtensorMap* b_map, int b_lines = 128);

// Returns whether COMET's kernels may let clusters of two blocks compute a row of `tiles` tiles, a pair of
// tiles in each cluster. If `tiles` is odd, one block of the last pair computes nothing of use. From 7 tiles
// on, this wastes at most an eighth of the work. Grouped products have the stricter rule of sharing.h.
inline bool may_pair_tiles(int tiles) { return tiles % 2 == 0 || tiles >= 7; }

// Calls visit(which) for every kernel of one implementation.
template <class Visit>
void for_each_grouped_gemm(int cluster, Visit visit) {
  for (Element element : {Element::kBf16, Element::kFp16}) {
    for (Form form : {Form::kForward, Form::kInput, Form::kWeight})
      visit(GroupedGemm{element, form, Epilogue::kPlain, Activation::kNone, cluster});
    for (Activation activation :
         {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSwiglu}) {
      visit(GroupedGemm{element, Form::kForward, Epilogue::kHidden, activation, cluster});
      visit(GroupedGemm{element, Form::kInput, Epilogue::kHiddenGradient, activation, cluster});
    }
  }
}

}  // namespace pmoe
